"""Requests are distributed over data shards and workers."""

import numpy as np

from rrl.rollout.shards import assign_to_shards


def test_samples_of_a_prompt_go_to_one_shard_if_there_are_enough_prompts():
    prompts = [np.array([n // 4]) for n in range(16)]
    assert assign_to_shards(prompts, 2) == [
        [[*range(4)], [*range(8, 12)]],
        [[*range(4, 8)], [*range(12, 16)]],
    ]
    assert assign_to_shards(prompts[:4], 2) == [[[0], [2]], [[1], [3]]]
    assert assign_to_shards(prompts, 2, workers=3) == [
        [[place] for place in range(start, 16, 2)] for start in (0, 1)
    ]


def test_long_prompts_come_first_and_equal_lengths_in_their_order():
    prompts = [np.arange(length) for length in (1, 3, 2, 3)] + [np.arange(3)]
    assert assign_to_shards(prompts, 1) == [[[1, 3, 4], [2], [0]]]
    prompts = [np.full(length, place) for place, length in enumerate((1, 3, 2, 3))]
    assert assign_to_shards(prompts, 2) == [[[1], [2]], [[3], [0]]]


def test_the_samples_of_remaining_prompts_are_spread_over_the_shards():
    shares = assign_to_shards([np.array([n // 8]) for n in range(9 * 8)], 8)
    assert [sum(map(len, share)) for share in shares] == [9] * 8
    assert all(share == [[*range(8 * n, 8 * n + 8)], [64 + n]] for n, share in enumerate(shares))
