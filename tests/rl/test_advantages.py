"""Advantages without a critic equal hand calculations and independent implementations."""

import functools
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.rl.advantages import (
    batch_normalize,
    group_normalize,
    leave_one_out,
    low_spread,
    subtract_penalty_to_go,
    whiten,
)


def test_group_normalize_equals_python_statistics():
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat(np.arange(6), 5))
    rewards = rng.normal(size=30)
    found = group_normalize(rewards, groups)
    for group in range(6):
        members = [float(r) for r, g in zip(rewards, groups, strict=True) if g == group]
        mean, std = statistics.mean(members), statistics.stdev(members)
        wanted = [(r - mean) / (std + 1e-6) for r in members]
        np.testing.assert_allclose(found[groups == group], wanted, rtol=1e-5)


def test_group_normalize_with_population_std_and_without_scaling():
    rewards, groups = np.array([0.0, 1.0]), np.zeros(2, int)
    np.testing.assert_allclose(group_normalize(rewards, groups, unbiased=False), [-1, 1], rtol=1e-5)
    np.testing.assert_allclose(group_normalize(rewards, groups, scale=False), [-0.5, 0.5])


@pytest.mark.parametrize("rewards", [[0.7], [0.7, 0.7, 0.7]])
def test_a_group_with_equal_rewards_has_advantage_0(rewards):
    found = group_normalize(np.array(rewards), np.zeros(len(rewards), int))
    np.testing.assert_allclose(found, 0, atol=1e-6)
    assert low_spread(np.array(rewards), np.zeros(len(rewards), int)).all()


@pytest.mark.parametrize(("most", "low"), [(0.0, [3]), (0.4, [3, 7]), (1.0, [3, 5, 7])])
def test_low_spread_is_decided_per_group(most, low):
    groups = np.array([3, 5, 3, 5, 7, 7])
    found = low_spread(np.array([1.0, 0.0, 1.0, 1.0, 0.2, 0.6]), groups, most)
    assert found.tolist() == np.isin(groups, low).tolist()


numbers = st.floats(-10, 10, width=32)


def drawn(seed, count=12):
    rng = np.random.default_rng(seed)
    return rng.normal(size=count), rng.integers(0, 4, count)


@given(st.integers(0, 2**31))
def test_leave_one_out_equals_a_loop_over_the_other_samples(seed):
    rewards, groups = drawn(seed)
    for i, found in enumerate(leave_one_out(rewards, groups)):
        others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and j != i]
        wanted = rewards[i] - statistics.mean(others) if others else 0.0
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@given(st.integers(0, 2**31), numbers)
def test_group_baselines_are_invariant_to_a_shift_of_the_group(seed, shift):
    rewards, groups = drawn(seed)
    for estimate in (leave_one_out, functools.partial(group_normalize, scale=False)):
        np.testing.assert_allclose(
            estimate(rewards + shift * (groups == 1), groups), estimate(rewards, groups), atol=1e-5
        )


def test_dr_grpo_and_leave_one_out_differ_by_n_over_n_minus_1():
    # Liu et al. 2025, appendix A: RLOO's advantage is Dr. GRPO's times G / (G - 1).
    rewards, groups = np.random.default_rng(0).normal(size=20), np.repeat(np.arange(4), 5)
    dr_grpo = group_normalize(rewards, groups, scale=False)
    np.testing.assert_allclose(leave_one_out(rewards, groups), dr_grpo * 5 / 4, rtol=1e-5)


@given(st.integers(0, 2**31), st.booleans())
def test_batch_normalize_equals_whitening_one_token_trajectories(seed, baseline):
    rewards, groups = drawn(seed)
    centred = group_normalize(rewards, groups, scale=False) if baseline else rewards
    wanted = np.concatenate(whiten(list(centred[:, None]), [np.array([True])] * len(rewards)))
    np.testing.assert_allclose(batch_normalize(rewards, groups, baseline=baseline), wanted, atol=1e-5)
    np.testing.assert_allclose(batch_normalize(3 * rewards + 7, groups, baseline=baseline), wanted, atol=1e-5)


@pytest.mark.parametrize("baseline", [False, True])
def test_a_batch_with_equal_rewards_has_advantage_0(baseline):
    found = batch_normalize(np.full(6, 0.7), np.arange(6) // 2, baseline=baseline)
    np.testing.assert_allclose(found, 0, atol=1e-6)


@given(st.integers(0, 2**31))
def test_penalties_are_summed_from_the_token_to_the_end_of_its_trajectory(seed):
    rng = np.random.default_rng(seed)
    penalties = [rng.normal(size=n) for n in (3, 1, 5)]
    rewards = rng.normal(size=3)
    for reward, penalty, found in zip(
        rewards, penalties, subtract_penalty_to_go(rewards, penalties), strict=True
    ):
        wanted = [reward - sum(penalty.tolist()[t:]) for t in range(len(penalty))]
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@given(st.integers(0, 2**31), st.floats(-100, 100))
def test_whitened_policy_tokens_have_mean_0_and_std_1_whatever_other_tokens_hold(seed, noise):
    rng = np.random.default_rng(seed)
    masks = [np.array([False, True, True, False]), np.array([True, True])]
    values = [rng.normal(size=4), rng.normal(size=2)]
    moved = [v + noise * ~m for v, m in zip(values, masks, strict=True)]
    chosen = [float(x) for v, m in zip(values, masks, strict=True) for x in v[m]]
    mean, std = statistics.mean(chosen), statistics.pstdev(chosen)
    for value, mask, found, other in zip(
        values, masks, whiten(values, masks), whiten(moved, masks), strict=True
    ):
        np.testing.assert_allclose(found[mask], [(x - mean) / std for x in value[mask]], rtol=1e-4, atol=1e-5)
        assert not found[~mask].any()
        np.testing.assert_array_equal(found, other)


def test_whitening_may_keep_the_mean():
    found = whiten([np.array([1.0, 3.0])], [np.array([True, True])], center=False)
    np.testing.assert_allclose(found[0], [1, 3], rtol=1e-6)


def test_reinforce_plus_plus_whitens_the_return_of_rewards_minus_kl():
    # Two trajectories, rewards 1 and 0, beta·k1 = 0.1 per policy token: returns 0.8, 0.9 and -0.1; mean 0.5333.
    masks = [np.array([False, True, True]), np.array([False, True])]
    found = whiten(subtract_penalty_to_go(np.array([1.0, 0.0]), [0.1 * m for m in masks]), masks)
    np.testing.assert_allclose(np.concatenate(found), [0, 0.59299945, 0.81537425, 0, -1.4083737], rtol=1e-5)
