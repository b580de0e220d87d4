"""What begins alike is prefilled once: rows find those that hold it, when that saves a chunk and once it is there."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.rollout.prefixes import PrefixIndex

PROMPT = np.arange(10, dtype=np.int32)


def fed(prefixes, row, tokens):
    prefixes.opens(row, tokens)
    prefixes.filled(row, len(tokens))
    prefixes.settle()


def test_a_prompt_that_nobody_holds_is_prefilled():
    assert PrefixIndex(3, 4).find(1, PROMPT) == (1, 0, True)


def test_a_prompt_that_another_row_is_being_fed_is_waited_for_and_then_copied():
    prefixes = PrefixIndex(3, 4)
    prefixes.opens(0, PROMPT)
    prefixes.filled(0, 4)
    assert prefixes.find(1, PROMPT) == (0, 10, False)
    prefixes.settle()
    assert prefixes.find(1, PROMPT) == (0, 10, False)
    assert not prefixes.fed(0, 10)
    prefixes.filled(0, 10)
    # the device has not prefilled it yet: it can be copied last in this exchange, or in the next
    assert prefixes.find(1, PROMPT) == (0, 10, False) and prefixes.fed(0, 10)
    prefixes.settle()
    assert prefixes.find(1, PROMPT) == (0, 10, True) and not prefixes.fed(0, 10)


def test_what_is_copied_last_is_copied_from_who_was_fed_it():
    prefixes = PrefixIndex(4, 4)
    prefixes.opens(2, PROMPT)
    prefixes.filled(2, 10)
    prefixes.opens(0, PROMPT)
    prefixes.filled(0, 10, last=True)
    assert not prefixes.fed(0, 10) and prefixes.find(1, PROMPT) == (2, 10, False)
    prefixes.settle()
    assert prefixes.find(1, PROMPT) == (0, 10, True)


def test_a_row_prefers_what_it_holds_itself():
    prefixes = PrefixIndex(3, 4)
    fed(prefixes, 0, PROMPT)
    fed(prefixes, 2, PROMPT)
    assert prefixes.find(2, PROMPT) == (2, 10, True)
    assert prefixes.find(1, PROMPT) == (0, 10, True)


def test_a_common_beginning_counts_where_it_saves_a_chunk():
    prefixes = PrefixIndex(2, 4)
    fed(prefixes, 0, PROMPT)
    other = np.concatenate([PROMPT[:6], [99, 98, 97, 96]]).astype(np.int32)
    assert prefixes.find(1, other) == (0, 6, True)  # 1 chunk instead of 3
    fed(prefixes, 0, PROMPT[:1])
    assert prefixes.find(1, PROMPT) == (1, 0, True)  # 3 chunks either way


def told(prefixes, row, written, answer):
    """The row wrote these and is to be fed that answer behind them."""
    prefixes.wrote(row, np.array(written, np.int32))
    return np.concatenate([prefixes.held(row), np.array(answer, np.int32)])


def test_who_wrote_and_reads_the_same_copies_what_another_row_has_read():
    prefixes, answer = PrefixIndex(3, 4), [*range(20, 30)]
    for row in range(3):
        fed(prefixes, row, PROMPT)
    texts = [told(prefixes, row, written, answer) for row, written in enumerate([[7, 8], [7, 8], [7, 9]])]
    assert prefixes.find(0, texts[0], own=12) == (0, 12, True)  # nobody holds it yet
    prefixes.opens(0, texts[0], 12)
    prefixes.filled(0, 22)
    assert prefixes.find(1, texts[1], own=12) == (0, 22, False)
    prefixes.settle()
    assert prefixes.find(1, texts[1], own=12) == (0, 22, True)
    assert prefixes.find(2, texts[2], own=12) == (2, 12, True)  # it wrote something else


def test_what_a_row_decoded_is_not_copied_by_one_that_is_fed_it():
    prefixes = PrefixIndex(2, 4)
    fed(prefixes, 0, PROMPT[:6])
    prefixes.wrote(0, PROMPT[6:])
    assert prefixes.find(1, PROMPT) == (0, 6, True)
    assert (prefixes.held(0) == [0, 1, 2, 3, 4, 5, ~6, ~7, ~8, ~9]).all()


def test_what_a_row_wrote_is_there_though_it_was_fed_in_the_same_exchange():
    prefixes = PrefixIndex(2, 4)
    prefixes.opens(0, PROMPT, 0)
    prefixes.filled(0, 10)
    prefixes.wrote(0, np.array([3]))
    prefixes.settle()
    assert prefixes.find(1, prefixes.held(0)) == (0, 11, True)


def test_a_row_that_waits_for_no_one_keeps_its_own():
    prefixes = PrefixIndex(2, 4)
    fed(prefixes, 0, PROMPT)
    text = told(prefixes, 0, [3], [5])
    assert prefixes.find(0, text, own=11) == (0, 11, True)
    fed(prefixes, 1, np.abs(text))  # 3 is fed there, and was decoded here
    assert prefixes.find(0, text, own=11) == (0, 11, True)
    fed(prefixes, 1, text)
    assert prefixes.find(0, text, own=11) == (1, 12, True)


def test_a_single_chunk_behind_its_own_is_copied_but_not_waited_for():
    prefixes, answer = PrefixIndex(2, 4), [*range(20, 29)]
    for row in range(2):
        fed(prefixes, row, PROMPT)
    for size, there in ((4, True), (8, False)):  # 1 chunk, 2 chunks
        texts = [told(prefixes, row, [7], answer[:size]) for row in range(2)]
        own = len(texts[0]) - size
        prefixes.opens(0, texts[0], own)
        assert prefixes.find(1, texts[1], own) == ((1, own, True) if there else (0, len(texts[1]), False))
        prefixes.filled(0, len(texts[0]))
        prefixes.settle()
        assert prefixes.find(1, texts[1], own) == (0, len(texts[1]), True)
        prefixes.opens(1, texts[1], len(texts[1]))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=5), st.integers(1, 5))
def test_what_is_copied_is_the_longest_common_beginning(held, chunk):
    *others, tokens = (np.array(ids, np.int32) for ids in [*held, [0, 1, 0, 0, 1, 0, 1, 1]])
    prefixes = PrefixIndex(len(others) + 1, chunk)
    for row, ids in enumerate(others):
        fed(prefixes, row, ids)
    source, copied, there = prefixes.find(len(others), tokens)
    assert there
    longest = 0
    for ids in others:
        same = 0
        while same < min(len(ids), len(tokens)) and ids[same] == tokens[same]:
            same += 1
        longest = max(longest, same)
    saves = -(-(len(tokens) - longest) // chunk) < -(-len(tokens) // chunk)
    assert copied == (longest if saves else 0)
    if copied:
        np.testing.assert_array_equal(others[source][:copied], tokens[:copied])


def test_what_is_forgotten_is_copied_by_nobody():
    prefixes = PrefixIndex(3, 4)
    fed(prefixes, 0, PROMPT)
    prefixes.opens(1, PROMPT)
    prefixes.filled(1, 10)
    assert prefixes.find(2, PROMPT) == (0, 10, True)
    prefixes.forget(0)
    prefixes.forget(1)
    prefixes.settle()
    assert prefixes.find(2, PROMPT) == (2, 0, True)
