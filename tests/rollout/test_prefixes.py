"""A prompt is prefilled once: rows find those that hold its beginning, when that saves a chunk and once it is there."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rrl.rollout.prefixes import Prefixes

PROMPT = np.arange(10, dtype=np.int32)


def fed(prefixes, row, tokens):
    prefixes.opens(row, tokens)
    prefixes.filled(row, len(tokens))
    prefixes.settle()


def test_a_prompt_that_nobody_holds_is_prefilled():
    assert Prefixes(3, 4).find(1, PROMPT) == (1, 0, True)


def test_a_prompt_that_another_row_is_being_fed_is_waited_for_and_then_copied():
    prefixes = Prefixes(3, 4)
    prefixes.opens(0, PROMPT)
    prefixes.filled(0, 4)
    assert prefixes.find(1, PROMPT) == (0, 10, False)
    prefixes.settle()
    assert prefixes.find(1, PROMPT) == (0, 10, False)
    prefixes.filled(0, 10)
    # the device copies before it prefills: what is fed in an exchange can be copied in the next
    assert prefixes.find(1, PROMPT) == (0, 10, False)
    prefixes.settle()
    assert prefixes.find(1, PROMPT) == (0, 10, True)


def test_a_row_prefers_what_it_holds_itself():
    prefixes = Prefixes(3, 4)
    fed(prefixes, 0, PROMPT)
    fed(prefixes, 2, PROMPT)
    assert prefixes.find(2, PROMPT) == (2, 10, True)
    assert prefixes.find(1, PROMPT) == (0, 10, True)


def test_a_common_beginning_counts_where_it_saves_a_chunk():
    prefixes = Prefixes(2, 4)
    fed(prefixes, 0, PROMPT)
    other = np.concatenate([PROMPT[:6], [99, 98, 97, 96]]).astype(np.int32)
    assert prefixes.find(1, other) == (0, 6, True)  # 1 chunk instead of 3
    fed(prefixes, 0, PROMPT[:1])
    assert prefixes.find(1, PROMPT) == (1, 0, True)  # 3 chunks either way


@given(st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=5), st.integers(1, 5))
def test_what_is_copied_is_the_longest_common_beginning(held, chunk):
    *others, tokens = (np.array(ids, np.int32) for ids in [*held, [0, 1, 0, 0, 1, 0, 1, 1]])
    prefixes = Prefixes(len(others) + 1, chunk)
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
