"""Group-normalised advantages against hand calculation and an independent implementation."""

import statistics

import numpy as np
import pytest

from rrl.rl.advantages import group_normalize, low_spread


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
    assert low_spread(np.array(rewards), np.zeros(len(rewards), int)).all()


@pytest.mark.parametrize(("most", "low"), [(0.0, [3]), (0.4, [3, 7]), (1.0, [3, 5, 7])])
def test_low_spread_is_told_group_by_group(most, low):
    groups = np.array([3, 5, 3, 5, 7, 7])
    found = low_spread(np.array([1.0, 0.0, 1.0, 1.0, 0.2, 0.6]), groups, most)
    assert found.tolist() == np.isin(groups, low).tolist()
