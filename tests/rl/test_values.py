"""The critic's loss equals hand calculations, and explained variance is the same for any split of the tokens."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.rl.values import MOMENTS, explained_variance, value_loss, value_moments

numbers = st.lists(st.floats(-5, 5, width=32), min_size=6, max_size=6)


def test_the_value_loss_equals_hand_calculations():
    # V, V_old, R: within the clip; beyond it with the larger clipped loss; beyond it with the larger plain loss.
    loss, clipped = value_loss(
        *jnp.array([[[0.3, 1.0, 1.0]], [[0.1, 0.0, 0.0]], [[1.0, 2.0, -1.0]]]), clip=0.5
    )
    np.testing.assert_allclose(loss, [[0.5 * 0.49, 0.5 * 1.5**2, 0.5 * 4.0]], rtol=1e-6)
    assert clipped.tolist() == [[0, 1, 0]]


@settings(deadline=None, max_examples=40)
@given(numbers, numbers, numbers, st.floats(0, 2))
def test_the_value_loss_equals_a_loop_and_the_clip_never_lowers_it(values, old, returns, clip):
    loss, _ = value_loss(*(jnp.array([x]) for x in (values, old, returns)), clip=clip)
    plain, _ = value_loss(*(jnp.array([x]) for x in (values, old, returns)), clip=None)
    for i, (v, o, r) in enumerate(zip(values, old, returns, strict=True)):
        bounded = min(max(v, o - clip), o + clip)
        np.testing.assert_allclose(
            loss[0, i], 0.5 * max((v - r) ** 2, (bounded - r) ** 2), rtol=1e-4, atol=1e-4
        )
    assert (loss >= plain - 1e-6).all()


def test_a_value_that_moved_beyond_the_clip_towards_its_return_gets_no_gradient():
    grad = jax.grad(lambda v: value_loss(v, jnp.zeros(2), jnp.array([2.0, 2.0]), clip=0.5)[0].sum())
    np.testing.assert_allclose(grad(jnp.array([0.4, 0.6])), [-1.6, 0.0], rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(numbers, numbers, st.integers(1, 5))
def test_explained_variance_is_the_same_for_any_split(values, returns, cut):
    values, returns = np.array(values), np.array(returns)
    parts = [
        value_moments(
            *(jnp.array([x]) for x in (values[span], returns[span])), jnp.ones((1, len(values[span])))
        )
        for span in (slice(0, cut), slice(cut, None))
    ]
    found = explained_variance({name: float(sum(part[name] for part in parts)) for name in MOMENTS})
    total = statistics.pvariance(returns.tolist())
    if total > 1e-3:
        wanted = 1 - statistics.pvariance((returns - values).tolist()) / total
        np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-2)


def test_explained_variance_of_perfect_and_constant_critics_and_masked_tokens():
    returns, mask = jnp.array([[1.0, 2.0, 4.0, 100.0]]), jnp.array([[1.0, 1.0, 1.0, 0.0]])
    assert explained_variance(value_moments(returns, returns, mask)) == 1.0
    np.testing.assert_allclose(
        explained_variance(value_moments(jnp.ones((1, 4)), returns, mask)), 0, atol=1e-6
    )
    assert explained_variance(value_moments(returns, jnp.ones((1, 4)), mask)) == 0.0
