"""GAE over policy tokens of packed rows equals loops written from the formula; observations do not affect it."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.rl.gae import gae, values_before_tokens

LENGTH = 12
roles = st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH)
seeds = st.integers(0, 2**31 - 1)


def by_hand(rewards, values, policy, discount, gae_lambda):
    """A trajectory's advantages by Schulman et al. 2016, Eqs. 11 and 16, as sums over its policy tokens."""
    at = [t for t, own in enumerate(policy) if own]
    out = [0.0] * len(policy)
    for i, t in enumerate(at):
        for k in range(i, len(at)):
            following = values[at[k + 1]] if k + 1 < len(at) else 0.0
            delta = rewards[at[k]] + discount * following - values[at[k]]
            out[t] += (discount * gae_lambda) ** (k - i) * delta
    return out


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=(2, *shape)).astype(np.float32)


@settings(deadline=None, max_examples=40)
@given(seeds, st.lists(roles, min_size=2, max_size=2), st.integers(1, LENGTH - 1))
def test_gae_equals_loops_over_each_trajectory_for_any_packing(seed, policy, cut):
    # Row 0 has two trajectories, split at `cut`; row 1 has one, followed by padding.
    rewards, values = draw(seed, 2, LENGTH)
    policy = np.array(policy)
    segments = np.ones((2, LENGTH), int)
    segments[0, cut:], segments[1, cut:] = 2, 0
    policy[1, cut:] = False
    advantages, returns = gae(rewards, values, policy, segments, discount=0.9, gae_lambda=0.8)
    for row, span in ((0, slice(0, cut)), (0, slice(cut, None)), (1, slice(None))):
        wanted = by_hand(*(x[row, span].tolist() for x in (rewards, values, policy)), 0.9, 0.8)
        np.testing.assert_allclose(advantages[row, span], wanted, atol=1e-5)
    np.testing.assert_allclose(returns, np.where(policy, advantages + values, 0), atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(seeds, seeds, roles)
def test_values_and_rewards_at_observations_never_change_an_advantage(seed, other, policy):
    policy, segments = np.array([policy]), np.ones((1, LENGTH), int)
    (rewards, values), (noise, more) = draw(seed, 1, LENGTH), 100 * draw(other, 1, LENGTH)
    plain = gae(rewards, values, policy, segments, discount=0.95, gae_lambda=0.9)
    moved = gae(
        rewards + np.where(policy, 0, noise),
        values + np.where(policy, 0, more),
        policy,
        segments,
        discount=0.95,
        gae_lambda=0.9,
    )
    for one, two in zip(plain, moved, strict=True):
        np.testing.assert_array_equal(one, two)


@settings(deadline=None, max_examples=30)
@given(seeds, st.integers(0, LENGTH - 4), st.integers(1, 4))
def test_observations_are_not_discounted(seed, place, length):
    (rewards, values), policy = draw(seed, 1, LENGTH), np.ones((1, LENGTH), bool)
    without = np.delete(np.arange(LENGTH), np.s_[place : place + length])
    policy[:, place : place + length] = False
    segments = np.ones((1, LENGTH), int)
    longer, _ = gae(rewards, values, policy, segments, discount=0.5, gae_lambda=0.5)
    shorter = (rewards[:, without], values[:, without], policy[:, without], segments[:, without])
    np.testing.assert_allclose(longer[:, without], gae(*shorter, discount=0.5, gae_lambda=0.5)[0], atol=1e-6)


def test_without_discount_the_return_is_the_sum_of_later_rewards():
    # R-Search: gamma = lambda = 1 (SPEC.md 6), so A = R - V, independent of the values in between.
    rewards, values = np.array([[0, 1, 0, 2, 0]], np.float32), np.array([[9, 3, -1, 4, 2]], np.float32)
    policy = np.array([[False, True, True, True, False]])
    advantages, returns = gae(rewards, values, policy, np.ones((1, 5), int))
    np.testing.assert_allclose(returns, [[0, 3, 2, 2, 0]], atol=1e-6)
    np.testing.assert_allclose(advantages, [[0, 0, 3, -2, 0]], atol=1e-6)


def test_r3_rags_steps_as_segments_and_as_time_steps_of_eq_8():
    # R3-RAG as released: three steps of one episode are three segments, each with its reward on its last token.
    segments = np.array([[1, 1, 2, 2, 3, 3]])
    rewards, values = np.array([[0, 0.8, 0, -1, 0, 2]], np.float32), np.full((1, 6), 0.5, np.float32)
    advantages, _ = gae(rewards, values, segments > 0, segments)
    np.testing.assert_allclose(advantages, [[0.3, 0.3, -1.5, -1.5, 1.5, 1.5]], atol=1e-6)
    # Eq. 8: entries are steps and the segment is the episode; delta = 0.8, -1 and 1.5 with V = 0.5.
    steps = gae(
        np.array([[0.8, -1, 2]]),
        np.full((1, 3), 0.5),
        np.ones((1, 3), bool),
        np.ones((1, 3), int),
        gae_lambda=0.5,
    )
    np.testing.assert_allclose(steps[0], [[0.8 - 0.5 + 0.375, -1 + 0.75, 1.5]], atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_value_of_a_token_is_that_of_the_state_before_it(rows):
    after = jnp.arange(rows * 4.0).reshape(rows, 4)
    np.testing.assert_array_equal(values_before_tokens(after)[:, 1:], after[:, :-1])
    assert not values_before_tokens(after)[:, 0].any()
