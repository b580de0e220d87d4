"""Stop strings are matched on bytes, for any tokenization."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.errors import UserError
from rrl.rollout.automaton import compile_sets, compile_stops


def scan(strings: list[str], vocabulary: list[bytes], ids: list[int]) -> tuple[int, int] | None:
    """Reference: (token index, stop index) of the stop string that is completed first in the decoded bytes."""
    text = b""
    for place, token in enumerate(ids):
        for byte in vocabulary[token]:
            text += bytes([byte])
            ended = [i for i, s in enumerate(strings) if text.endswith(s.encode())]
            if ended:
                return place, max(ended, key=lambda i: len(strings[i]))
    return None


def walk(strings: list[str], vocabulary: list[bytes], ids: list[int]) -> tuple[int, int] | None:
    automaton = compile_stops(strings, vocabulary)
    state = 0
    for place, token in enumerate(ids):
        state = int(automaton.table[state, token])
        if state >= automaton.first_accept:
            return place, state - automaton.first_accept
    return None


@settings(max_examples=300, deadline=None)
@given(
    strings=st.lists(st.text("ab</>", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    vocabulary=st.lists(
        st.binary(max_size=6).map(lambda b: bytes(b"ab</>"[x % 5] for x in b)), min_size=1, max_size=12
    ),
    data=st.data(),
)
def test_the_automaton_agrees_with_a_scan_of_the_text(strings, vocabulary, data):
    ids = data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=20))
    assert walk(strings, vocabulary, ids) == scan(strings, vocabulary, ids)


def test_a_tag_is_matched_for_every_tokenization():
    vocabulary = [b"</search>", b"</", b"search", b">", b">\n", b"</sea", b"rch>x", b""]
    for ids in ([0], [1, 2, 3], [1, 2, 4], [5, 6], [1, 7, 2, 3], [1, 1, 2, 3]):
        assert walk(["</search>"], vocabulary, ids) == (len(ids) - 1, 0)
    assert walk(["</search>"], vocabulary, [1, 2, 1, 3]) is None


def test_a_tag_with_non_ascii_characters_is_matched_byte_by_byte():
    vocabulary = [bytes([byte]) for byte in "</suché>".encode()]
    assert walk(["</suché>"], vocabulary, list(range(len(vocabulary)))) == (len(vocabulary) - 1, 0)
    assert walk(["</such?>"], vocabulary, list(range(len(vocabulary)))) is None


def test_an_automaton_without_stop_strings_never_accepts():
    automaton = compile_stops([], [b"a", b"b"])
    assert automaton.first_accept == 1
    assert np.all(automaton.table == 0)


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        ([""], "stop strings must be non-empty"),
        (["a", "a"], "stop strings must be non-empty and distinct"),
        (["a", "b\ud83d"], r"the stop string 'b\\ud83d' has a lone surrogate, '\\ud83d'"),
    ],
)
def test_empty_repeated_or_unencodable_stop_strings_are_refused(strings, message):
    with pytest.raises(UserError, match=message):
        compile_stops(strings, [b"a"])


@settings(max_examples=100, deadline=None)
@given(
    sets=st.lists(
        st.lists(st.text("ab<", min_size=1, max_size=3), max_size=3, unique=True).map(tuple),
        min_size=1,
        max_size=3,
        unique=True,
    ),
    vocabulary=st.lists(
        st.binary(max_size=4).map(lambda b: bytes(b"ab<"[x % 3] for x in b)), min_size=1, max_size=8
    ),
    data=st.data(),
)
def test_several_sets_in_one_table_stop_where_each_alone_does(sets, vocabulary, data):
    ids = data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=12))
    joined = compile_sets(sets, vocabulary)
    for strings in sets:
        state, match = joined.starts[strings], None
        for place, token in enumerate(ids):
            state = int(joined.table[state, token])
            if state >= joined.first_accept:
                match = place, strings.index(joined.strings[state - joined.first_accept])
                break
        assert match == walk(list(strings), vocabulary, ids)
