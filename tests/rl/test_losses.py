"""Policy objective and KL: values by hand, properties, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrl.errors import UserError
from rrl.rl.losses import clipped_objective, kl_k3, sequence_weights


def test_the_clip_bounds_the_gain_but_never_the_loss():
    logp = jnp.log(jnp.asarray([[1.5, 1.5, 0.5, 0.5]]))
    advantage = jnp.asarray([[1.0, -1.0, 1.0, -1.0]])
    loss, ratio, clipped = clipped_objective(logp, jnp.zeros((1, 4)), advantage, clip_low=0.2, clip_high=0.28)
    np.testing.assert_allclose(loss, [[-1.28, 1.5, -0.5, 0.8]], rtol=1e-6)
    np.testing.assert_allclose(ratio, [[1.5, 1.5, 0.5, 0.5]], rtol=1e-6)
    assert clipped.tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_on_policy_the_gradient_is_that_of_reinforce():
    logp = jnp.asarray([[-1.0, -2.0, -0.1]])
    advantage = jnp.asarray([[0.3, -2.0, 1.0]])
    grad = jax.grad(lambda x: clipped_objective(x, logp, advantage)[0].sum())(logp)
    np.testing.assert_allclose(grad, -advantage, rtol=1e-6)


def test_k3_is_unbiased_and_never_negative():
    rng = np.random.default_rng(0)
    policy, reference = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    estimates = np.asarray(kl_k3(jnp.log(policy), jnp.log(reference)))
    assert (estimates >= 0).all()
    np.testing.assert_allclose(
        (policy * estimates).sum(), (policy * np.log(policy / reference)).sum(), rtol=1e-4
    )


def test_weights_by_aggregation():
    counts = np.array([2, 4])
    weights, total = sequence_weights(counts, "token_mean")
    assert weights.tolist() == [1, 1]
    assert total == 6
    weights, total = sequence_weights(counts, "sequence_mean")
    assert weights.tolist() == [0.5, 0.25]
    assert total == 2
    with pytest.raises(UserError, match="token_mean, sequence_mean"):
        sequence_weights(counts, "median")
