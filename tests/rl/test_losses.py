"""Policy losses and KL estimates: values by hand, properties, and gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.errors import UserError
from rrl.rl.losses import (
    KL_ESTIMATORS,
    clipped_objective,
    kl_estimate,
    sequence_weights,
    truncated_importance,
)

logs = st.floats(-4, 0, width=32)


def test_the_clip_bounds_the_gain_but_never_the_loss():
    logp = jnp.log(jnp.asarray([[1.5, 1.5, 0.5, 0.5]]))
    advantage = jnp.asarray([[1.0, -1.0, 1.0, -1.0]])
    loss, ratio, clipped = clipped_objective(logp, jnp.zeros((1, 4)), advantage, clip_low=0.2, clip_high=0.28)
    np.testing.assert_allclose(loss, [[-1.28, 1.5, -0.5, 0.8]], rtol=1e-6)
    np.testing.assert_allclose(ratio, [[1.5, 1.5, 0.5, 0.5]], rtol=1e-6)
    assert clipped.tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_the_on_policy_gradient_equals_reinforce():
    logp = jnp.asarray([[-1.0, -2.0, -0.1]])
    advantage = jnp.asarray([[0.3, -2.0, 1.0]])
    grad = jax.grad(lambda x: clipped_objective(x, logp, advantage)[0].sum())(logp)
    np.testing.assert_allclose(grad, -advantage, rtol=1e-6)


def test_k3_is_unbiased_and_never_negative():
    rng = np.random.default_rng(0)
    policy, reference = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    estimates = np.asarray(kl_estimate(jnp.log(policy), jnp.log(reference)))
    assert (estimates >= 0).all()
    np.testing.assert_allclose(
        (policy * estimates).sum(), (policy * np.log(policy / reference)).sum(), rtol=1e-4
    )


@settings(deadline=None, max_examples=60)
@given(logs, logs, st.floats(-3, 3, width=32), st.sampled_from([None, 1.5, 3.0]))
def test_the_clipped_objective_equals_the_formula_with_and_without_dual_clip(logp, old, advantage, dual):
    loss, ratio, _ = clipped_objective(
        *(jnp.array([[x]], jnp.float32) for x in (logp, old, advantage)),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual,
    )
    r = math.exp(logp - old)
    surrogate = min(r * advantage, min(max(r, 0.8), 1.28) * advantage)
    if dual is not None and advantage < 0:
        surrogate = max(surrogate, dual * advantage)  # Ye et al. 2020, Eq. 5
    np.testing.assert_allclose(float(loss[0, 0]), -surrogate, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(float(ratio[0, 0]), r, rtol=1e-4)


def test_the_dual_clip_bounds_the_loss_and_its_gradient_is_0_there():
    def loss(logp, dual):
        return clipped_objective(logp, jnp.zeros((1, 3)), jnp.array([[-1.0, -1, 1]]), dual_clip=dual)

    logp = jnp.log(jnp.array([[2.0, 10, 10]]))
    found, _, active = loss(logp, 3.0)
    np.testing.assert_allclose(found, [[2.0, 3, -1.2]], rtol=1e-6)
    assert active.tolist() == [[0, 1, 1]]
    gradient = jax.grad(lambda x: loss(x, 3.0)[0].sum())(logp)
    np.testing.assert_allclose(gradient, [[2.0, 0, 0]], rtol=1e-6)


def test_kl_estimates_equal_hand_calculations():
    policy, reference = jnp.log(jnp.array([[0.5]])), jnp.log(jnp.array([[0.25]]))
    for name, wanted in {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": 0.5 - 1 + math.log(2)}.items():
        np.testing.assert_allclose(kl_estimate(policy, reference, name), [[wanted]], rtol=1e-6)
    with pytest.raises(UserError, match="k1, k2, k3"):
        kl_estimate(policy, reference, "k4")


def test_as_losses_k1_has_no_gradient_on_average_and_k2_has_that_of_the_kl():
    # Expectations over the whole distribution, on policy: sum of pi(a) times the gradient of the estimate at a.
    rng = np.random.default_rng(1)
    logits, reference = jnp.array(rng.normal(size=6)), jnp.log(jnp.array(rng.dirichlet(np.ones(6))))
    policy = jax.nn.softmax(logits)

    def expected(name):
        return jax.grad(lambda x: (policy * kl_estimate(jax.nn.log_softmax(x), reference, name)).sum())(
            logits
        )

    true = jax.grad(lambda x: (jax.nn.softmax(x) * (jax.nn.log_softmax(x) - reference)).sum())(logits)
    np.testing.assert_allclose(expected("k1"), 0, atol=1e-6)
    np.testing.assert_allclose(expected("k2"), true, atol=1e-5)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_the_kl_from_an_equal_reference_is_0(name):
    logp = jnp.array([[-0.1, -3.0]])
    assert not kl_estimate(logp, logp, name).any()


@settings(deadline=None, max_examples=40)
@given(st.floats(-90, 0, width=32), st.floats(-90, 0, width=32), st.floats(1, 5))
def test_importance_is_the_capped_ratio_without_gradient(logp, sampled, most):
    value, grad = jax.value_and_grad(lambda x: truncated_importance(x, jnp.float32(sampled), most))(
        jnp.float32(logp)
    )
    np.testing.assert_allclose(value, min(math.exp(logp - sampled), most), rtol=1e-4, atol=1e-30)
    assert grad == 0


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 8))
def test_each_aggregation_equals_loops(seed, sequences):
    rng = np.random.default_rng(seed)
    losses = [rng.normal(size=rng.integers(1, 6)) for _ in range(sequences)]
    groups = rng.integers(0, 3, sequences)
    counts = np.array([len(x) for x in losses])
    every = [float(x) for loss in losses for x in loss]
    of_group = [
        [float(x) for loss, g in zip(losses, groups, strict=True) if g == group for x in loss]
        for group in sorted(set(groups.tolist()))
    ]
    wanted = {
        "token_mean": sum(every) / len(every),
        "sequence_mean": sum(sum(x) / len(x) for x in losses) / sequences,
        "group_token_mean": sum(sum(x) / len(x) for x in of_group) / len(of_group),
        "constant": sum(sum(x) for x in losses) / (7 * sequences),
    }
    for name, value in wanted.items():
        weights, total = sequence_weights(counts, name, groups, constant_tokens=7)
        found = sum(float(w) * x.sum() for w, x in zip(weights, losses, strict=True)) / total
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)


def test_weights_of_each_aggregation():
    counts = np.array([2, 4])
    weights, total = sequence_weights(counts, "token_mean")
    assert weights.tolist() == [1, 1]
    assert total == 6
    weights, total = sequence_weights(counts, "sequence_mean")
    assert weights.tolist() == [0.5, 0.25]
    assert total == 2
    with pytest.raises(UserError, match="token_mean, sequence_mean, group_token_mean, constant"):
        sequence_weights(counts, "median")
