"""Group-normalised advantages against hand calculation and an independent implementation."""

import statistics

import numpy as np
import pytest

from rrl.rl.advantages import group_normalize, zero_spread


def test_equals_python_statistics_group_by_group():
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat(np.arange(6), 5))
    rewards = rng.normal(size=30)
    found = group_normalize(rewards, groups)
    for group in range(6):
        members = [float(r) for r, g in zip(rewards, groups, strict=True) if g == group]
        mean, std = statistics.mean(members), statistics.stdev(members)
        wanted = [(r - mean) / (std + 1e-6) for r in members]
        np.testing.assert_allclose(found[groups == group], wanted, rtol=1e-5)


def test_population_std_and_no_scaling():
    rewards, groups = np.array([0.0, 1.0]), np.zeros(2, int)
    np.testing.assert_allclose(group_normalize(rewards, groups, unbiased=False), [-1, 1], rtol=1e-5)
    np.testing.assert_allclose(group_normalize(rewards, groups, scale=False), [-0.5, 0.5])


@pytest.mark.parametrize("rewards", [[0.7], [0.7, 0.7, 0.7]])
def test_a_group_without_spread_has_no_advantage(rewards):
    found = group_normalize(np.array(rewards), np.zeros(len(rewards), int))
    np.testing.assert_allclose(found, 0, atol=1e-6)
    assert zero_spread(np.array(rewards), np.zeros(len(rewards), int)).all()


def test_zero_spread_is_told_group_by_group():
    flat = zero_spread(np.array([1.0, 0.0, 1.0, 1.0]), np.array([3, 5, 3, 5]))
    assert flat.tolist() == [True, False, True, False]
