"""The policy loss: the default is the papers' GRPO, and each option equals its formula."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrl.errors import UserError
from rrl.rl.batch import Batch
from rrl.rl.logprobs import TokenScores
from rrl.rl.objective import ObjectiveConfig, policy_loss

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


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    names = ("logp", "entropy", "reference", "old_logp", "advantage", "weight", "sampled_logp")
    found = {name: rng.normal(size=(ROWS, LENGTH)).astype(np.float32) for name in names}
    return found | {"reference_logp": found["reference"]}


def loss_of(config, values, mask):
    tokens = jnp.zeros((ROWS, LENGTH), jnp.int32)
    batch = Batch(tokens, tokens, tokens + 1, mask, {name: jnp.array(values[name]) for name in config.extras})
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
    assert set(sums) == set(config.sums) and float(sums["tokens"]) == mask.sum()


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"dual_clip": 0.5},
        {"clip_low": 2.0},
        {"importance_cap": 0.0},
        {"entropy_coef": -1.0},
        {"kl_estimator": "k4"},
        {"kl_in": "prompt"},
        {"aggregation": "median"},
        {"constant_tokens": 0},
        {"epochs": 0},
    ],
    ids=str,
)
def test_an_invalid_field_is_named_with_its_value(wrong):
    ((field, value),) = wrong.items()
    with pytest.raises(UserError, match=rf"objective\.{field}={value!r}"):
        ObjectiveConfig(**wrong)
