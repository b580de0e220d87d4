"""Dynamic sampling: groups with different rewards are informative, and missing ones are sampled by their frequency."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rrl.rl.dynamic_sampling import groups_to_sample, informative_groups


def test_two_rounds_by_hand():
    assert groups_to_sample(target=3, sampled=0, informative=0) == 3
    assert (
        groups_to_sample(target=3, sampled=6, informative=2) == 3
    )  # one is missing, one in three is informative
    assert groups_to_sample(target=3, sampled=9, informative=4) == 0


@given(st.integers(1, 100), st.integers(0, 500), st.integers(0, 500))
def test_a_round_samples_at_least_the_missing_groups_and_at_most_the_target(target, sampled, informative):
    informative = min(informative, sampled)
    count = groups_to_sample(target, sampled, informative)
    assert max(0, target - informative) <= count <= target
    assert (count == 0) == (informative >= target)


def test_groups_with_different_rewards_are_informative_in_sampling_order():
    groups = np.repeat([5, 2, 9], 2)
    rewards = np.array([0.0, 1.0, 0.5, 0.5, 0.2, 0.3])
    assert informative_groups(rewards, groups) == [5, 9]
    assert informative_groups(rewards, groups, drop_spread=0.2) == [5]
    assert informative_groups(rewards, groups, drop_spread=None) == [5, 2, 9]


def test_excluded_groups_are_never_informative():
    rewards, groups = np.array([0.0, 1.0, 0.0, 1.0, 0.0, 0.0]), np.repeat([0, 1, 2], 2)
    assert informative_groups(rewards, groups, excluded=groups == 0) == [1]
    assert informative_groups(rewards, groups, None, groups == 0) == [1, 2]
