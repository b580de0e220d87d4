"""Prefix sharing: a slot finds the slots that hold its prefix, if that saves a chunk and once the prefix is in their cache."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.rollout.prefixes import PrefixIndex

PROMPT = np.arange(10, dtype=np.int32)


def prefill(index, slot, tokens):
    index.assign(slot, tokens)
    index.schedule(slot, len(tokens))
    index.end_exchange()


def test_a_prompt_that_no_slot_holds_is_prefilled():
    assert PrefixIndex(3, 4).find_source(1, PROMPT) == (1, 0, True)


def test_a_prompt_that_another_slot_prefills_is_copied_once_it_is_complete():
    index = PrefixIndex(3, 4)
    index.assign(0, PROMPT)
    index.schedule(0, 4)
    assert index.find_source(1, PROMPT) == (0, 10, False)
    index.end_exchange()
    assert index.find_source(1, PROMPT) == (0, 10, False)
    assert not index.prefill_completes(0, 10)
    index.schedule(0, 10)
    # The device has not prefilled it yet: it can be copied at the end of this exchange, or in the next one.
    assert index.find_source(1, PROMPT) == (0, 10, False) and index.prefill_completes(0, 10)
    index.end_exchange()
    assert index.find_source(1, PROMPT) == (0, 10, True) and not index.prefill_completes(0, 10)


def test_a_copy_at_the_end_of_an_exchange_has_a_prefilled_source():
    index = PrefixIndex(4, 4)
    index.assign(2, PROMPT)
    index.schedule(2, 10)
    index.assign(0, PROMPT)
    index.schedule(0, 10, copied_after_prefill=True)
    assert not index.prefill_completes(0, 10) and index.find_source(1, PROMPT) == (2, 10, False)
    index.end_exchange()
    assert index.find_source(1, PROMPT) == (0, 10, True)


def test_a_slot_prefers_its_own_tokens():
    index = PrefixIndex(3, 4)
    prefill(index, 0, PROMPT)
    prefill(index, 2, PROMPT)
    assert index.find_source(2, PROMPT) == (2, 10, True)
    assert index.find_source(1, PROMPT) == (0, 10, True)


def test_a_common_prefix_is_shared_only_if_it_saves_a_chunk():
    index = PrefixIndex(2, 4)
    prefill(index, 0, PROMPT)
    other = np.concatenate([PROMPT[:6], [99, 98, 97, 96]]).astype(np.int32)
    assert index.find_source(1, other) == (0, 6, True)  # 1 chunk instead of 3
    prefill(index, 0, PROMPT[:1])
    assert index.find_source(1, PROMPT) == (1, 0, True)  # 3 chunks in both cases


def extended(index, slot, decoded, observation):
    """The text of a slot after it decoded some tokens and received an observation."""
    index.append_decoded(slot, np.array(decoded, np.int32))
    return np.concatenate([index.tokens(slot), np.array(observation, np.int32)])


def test_slots_with_equal_decoded_tokens_and_observations_share_both():
    index, observation = PrefixIndex(3, 4), [*range(20, 30)]
    for slot in range(3):
        prefill(index, slot, PROMPT)
    texts = [
        extended(index, slot, decoded, observation) for slot, decoded in enumerate([[7, 8], [7, 8], [7, 9]])
    ]
    assert index.find_source(0, texts[0], held=12) == (0, 12, True)  # no slot holds it yet
    index.assign(0, texts[0], 12)
    index.schedule(0, 22)
    assert index.find_source(1, texts[1], held=12) == (0, 22, False)
    index.end_exchange()
    assert index.find_source(1, texts[1], held=12) == (0, 22, True)
    assert index.find_source(2, texts[2], held=12) == (2, 12, True)  # it decoded other tokens


def test_decoded_tokens_are_not_copied_in_place_of_prefilled_ones():
    index = PrefixIndex(2, 4)
    prefill(index, 0, PROMPT[:6])
    index.append_decoded(0, PROMPT[6:])
    assert index.find_source(1, PROMPT) == (0, 6, True)
    assert (index.tokens(0) == [0, 1, 2, 3, 4, 5, ~6, ~7, ~8, ~9]).all()


def test_decoded_tokens_are_ready_even_if_the_slot_was_prefilled_in_the_same_exchange():
    index = PrefixIndex(2, 4)
    index.assign(0, PROMPT, 0)
    index.schedule(0, 10)
    index.append_decoded(0, np.array([3]))
    index.end_exchange()
    assert index.find_source(1, index.tokens(0)) == (0, 11, True)


def test_a_slot_copies_only_an_equal_longer_prefix():
    index = PrefixIndex(2, 4)
    prefill(index, 0, PROMPT)
    text = extended(index, 0, [3], [5])
    assert index.find_source(0, text, held=11) == (0, 11, True)
    prefill(index, 1, np.abs(text))  # token 3 is prefilled there, and was decoded here
    assert index.find_source(0, text, held=11) == (0, 11, True)
    prefill(index, 1, text)
    assert index.find_source(0, text, held=11) == (1, 12, True)


def test_a_slot_copies_but_does_not_wait_for_a_single_chunk_after_its_own_tokens():
    index, observation = PrefixIndex(2, 4), [*range(20, 29)]
    for slot in range(2):
        prefill(index, slot, PROMPT)
    for size, own_is_better in ((4, True), (8, False)):  # 1 chunk, 2 chunks
        texts = [extended(index, slot, [7], observation[:size]) for slot in range(2)]
        held = len(texts[0]) - size
        index.assign(0, texts[0], held)
        expected = (1, held, True) if own_is_better else (0, len(texts[1]), False)
        assert index.find_source(1, texts[1], held) == expected
        index.schedule(0, len(texts[0]))
        index.end_exchange()
        assert index.find_source(1, texts[1], held) == (0, len(texts[1]), True)
        index.assign(1, texts[1], len(texts[1]))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=5), st.integers(1, 5))
def test_the_longest_common_prefix_is_copied(texts, chunk_tokens):
    *others, tokens = (np.array(ids, np.int32) for ids in [*texts, [0, 1, 0, 0, 1, 0, 1, 1]])
    index = PrefixIndex(len(others) + 1, chunk_tokens)
    for slot, ids in enumerate(others):
        prefill(index, slot, ids)
    source, copied, ready = index.find_source(len(others), tokens)
    assert ready
    longest = 0
    for ids in others:
        same = 0
        while same < min(len(ids), len(tokens)) and ids[same] == tokens[same]:
            same += 1
        longest = max(longest, same)
    saves = -(-(len(tokens) - longest) // chunk_tokens) < -(-len(tokens) // chunk_tokens)
    assert copied == (longest if saves else 0)
    if copied:
        np.testing.assert_array_equal(others[source][:copied], tokens[:copied])


def test_a_cleared_slot_is_no_source():
    index = PrefixIndex(3, 4)
    prefill(index, 0, PROMPT)
    index.assign(1, PROMPT)
    index.schedule(1, 10)
    assert index.find_source(2, PROMPT) == (0, 10, True)
    index.clear(0)
    index.clear(1)
    index.end_exchange()
    assert index.find_source(2, PROMPT) == (2, 0, True)
