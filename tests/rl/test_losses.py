"""The policy loss: the default is the papers' GRPO, each option equals its formula; KL estimates, gradients and weights."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.errors import UserError
from rrl.rl.batch import Batch
from rrl.rl.logprobs import TokenScores
from rrl.rl.losses import (
    clipped_objective,
    kl_estimate,
    policy_loss,
    sequence_weights,
    truncated_importance,
)
from rrl.rl.objective import KL_ESTIMATORS, ObjectiveConfig

ROWS, LENGTH = 3, 7
DEFAULT = ObjectiveConfig(kl_coef=0.1, clip_high=0.28)
OPTIONS = {
    "default": {},
    "k1": {"kl_estimator": "k1"},
    "k2": {"kl_estimator": "k2"},
    "kl in the reward": {"kl_in": "reward"},
    "dual clip": {"dual_clip": 1.5},
    "entropy": {"entropy_coef": 0.3},
    "importance": {"importance_cap": 1.2},
    "all": {"kl_estimator": "k2", "dual_clip": 1.5, "entropy_coef": 0.3, "importance_cap": 1.2},
}
logs = st.floats(-4, 0, width=32)


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    names = ("logp", "entropy", "reference", "old_logp", "advantage", "weight", "sampled_logp")
    found = {name: rng.normal(size=(ROWS, LENGTH)).astype(np.float32) for name in names}
    return found | {"reference_logp": found["reference"]}


def loss_of(config, values, mask):
    tokens = jnp.zeros((ROWS, LENGTH), jnp.int32)
    batch = Batch(
        tokens, tokens, tokens + 1, mask, {name: jnp.array(values[name]) for name in config.extra_names}
    )
    scores = TokenScores(jnp.array(values["logp"]), jnp.array(values["entropy"]))
    return policy_loss(scores, jnp.array(values["reference"]), batch, config)


def by_hand(config, values, mask):
    """The formulas in plain Python, token by token."""
    total = 0.0
    for place in zip(*np.nonzero(mask), strict=True):
        v = {name: float(array[place]) for name, array in values.items()}
        ratio = math.exp(v["logp"] - v["old_logp"])
        bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        surrogate = min(ratio * v["advantage"], bounded * v["advantage"])
        if config.dual_clip and v["advantage"] < 0:
            surrogate = max(surrogate, config.dual_clip * v["advantage"])
        if config.importance_cap:
            surrogate *= min(math.exp(v["old_logp"] - v["sampled_logp"]), config.importance_cap)
        d = v["reference"] - v["logp"]
        kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[config.kl_estimator]
        loss = -surrogate - config.entropy_coef * v["entropy"]
        loss += config.kl_coef * kl if config.kl_in == "loss" else 0.0
        total += v["weight"] * loss
    return total


@pytest.mark.parametrize("name", OPTIONS)
def test_the_loss_equals_the_formulas_token_by_token(name):
    config, values = dataclasses.replace(DEFAULT, **OPTIONS[name]), arrays()
    mask = np.random.default_rng(1).random((ROWS, LENGTH)) < 0.6
    value, sums = loss_of(config, values, mask)
    np.testing.assert_allclose(value, by_hand(config, values, mask), rtol=1e-5)
    assert set(sums) == set(config.sum_names) and float(sums["tokens"]) == mask.sum()


def test_the_default_equals_grpo_with_k3_bit_for_bit():
    # R-Search's loss, with the same order of floating-point operations.
    values, mask = {name: jnp.array(x) for name, x in arrays(2).items()}, jnp.ones((ROWS, LENGTH), bool)

    def grpo(logp):
        ratio = jnp.exp(logp - values["old_logp"])
        plain, bounded = ratio * values["advantage"], jnp.clip(ratio, 0.8, 1.28) * values["advantage"]
        d = jnp.clip(values["reference"] - logp, -20.0, 20.0)
        loss = -jnp.minimum(plain, bounded) + 0.1 * (jnp.exp(d) - d - 1.0)
        return jnp.sum(mask.astype(jnp.float32) * values["weight"] * loss)

    def ours(logp):
        return loss_of(DEFAULT, values | {"logp": logp}, mask)[0]

    found, wanted = (jax.jit(jax.value_and_grad(f))(values["logp"]) for f in (ours, grpo))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("name", OPTIONS)
def test_only_policy_tokens_are_read(name):
    config, values = dataclasses.replace(DEFAULT, **OPTIONS[name]), arrays()
    mask = np.arange(LENGTH) % 2 == np.zeros((ROWS, 1))
    moved = {n: np.where(mask, x, 3.0).astype(np.float32) for n, x in values.items()}
    for one, two in zip(
        jax.tree.leaves(loss_of(config, values, mask)),
        jax.tree.leaves(loss_of(config, moved, mask)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, two)


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
