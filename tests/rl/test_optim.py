"""Optimisers: schedules, Muon on stacked layers, and skipped updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from rrl.errors import UserError
from rrl.rl.optim import (
    OptimConfig,
    applied_updates,
    make_optimizer,
    make_schedule,
    running_mean,
    skipped_updates,
    split_trained,
)


def stacked_params():
    shapes = {
        "q": (3, 8, 2, 4),
        "o": (3, 2, 4, 8),
        "gate": (3, 8, 16),
        "attention_norm": (3, 8),
        "q_bias": (3, 2, 4),
    }
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
    layers = {n: jax.random.normal(keys[n], s) for n, s in shapes.items()}
    return {"embedding": jax.random.normal(jax.random.key(9), (20, 8)), "layers": layers}


def test_a_warm_up_ratio_of_095_rises_for_95_percent_of_the_steps():
    rate = make_schedule(OptimConfig(lr=1e-6, warmup_ratio=0.95, total_steps=100))
    rates = np.array([rate(s) for s in range(100)])
    assert np.all(np.diff(rates[:95]) > 0)
    np.testing.assert_allclose(rates[94:], 1e-6, rtol=1e-6)
    np.testing.assert_allclose(rates[0], 1e-6 / 95, rtol=1e-6)


def test_the_cosine_schedule_ends_at_the_final_ratio():
    rate = make_schedule(
        OptimConfig(lr=1.0, schedule="cosine", warmup_steps=10, total_steps=110, final_ratio=0.1)
    )
    np.testing.assert_allclose([rate(9), rate(60), rate(110)], [1.0, 0.55, 0.1], rtol=1e-5)


def test_the_linear_schedule_falls_linearly():
    rate = make_schedule(OptimConfig(lr=1.0, schedule="linear", total_steps=10))
    np.testing.assert_allclose([rate(s) for s in range(11)], 1 - np.arange(11) / 10, atol=1e-6)


@pytest.mark.parametrize("name", ["q", "o", "gate"])
def test_muon_orthogonalises_each_layer_separately(name):
    params = stacked_params()
    config = OptimConfig(name="muon", lr=1.0, clip_norm=None)
    optimizer = make_optimizer(config)
    grads = jax.tree.map(lambda x: x * 3.0, params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    matrices = {"q": (8, 8), "o": (8, 8), "gate": (8, 16)}
    for layer in updates["layers"][name]:
        values = np.linalg.svd(np.asarray(layer).reshape(matrices[name]), compute_uv=False)
        # Five Newton-Schulz steps bring the singular values near 1 (Jordan et al.: 0.7 to 1.2); 0.2 sqrt(fan) sets the RMS.
        scale = 0.2 * max(matrices[name]) ** 0.5
        assert values.max() < 1.35 * scale and np.median(values) > 0.6 * scale

    one = {"embedding": params["embedding"], "layers": jax.tree.map(lambda x: x[1:2], params["layers"])}
    alone, _ = optimizer.update(jax.tree.map(lambda x: x * 3.0, one), optimizer.init(one), one)
    np.testing.assert_allclose(alone["layers"][name][0], updates["layers"][name][1], atol=1e-5)


def test_muon_leaves_embeddings_norms_and_biases_to_adam():
    params = stacked_params()
    grads = jax.tree.map(jnp.ones_like, params)
    muon = make_optimizer(OptimConfig(name="muon", lr=1.0, adam_lr=0.1, clip_norm=None))
    adam = optax.adamw(
        0.1, b2=0.95, weight_decay=0.0, nesterov=True
    )  # optax's Muon uses Adam with Nesterov momentum for the other parameters
    by_muon, _ = muon.update(grads, muon.init(params), params)
    by_adam, _ = adam.update(grads, adam.init(params), params)
    np.testing.assert_allclose(by_muon["embedding"], by_adam["embedding"], rtol=1e-4)
    for name in ("attention_norm", "q_bias"):
        np.testing.assert_allclose(by_muon["layers"][name], by_adam["layers"][name], rtol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_is_on_matrices_only(name):
    params = stacked_params()
    optimizer = make_optimizer(OptimConfig(name=name, lr=1.0, weight_decay=0.5))
    updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert applied_updates(state) == 1
    np.testing.assert_allclose(updates["layers"]["q"], -0.5 * params["layers"]["q"], rtol=1e-5)
    assert not updates["layers"]["attention_norm"].any() and not updates["embedding"].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_update_with_a_non_finite_gradient_is_skipped_and_counted(bad):
    params = stacked_params()
    optimizer = make_optimizer(OptimConfig(name="adamw", lr=0.1))
    good = jax.tree.map(jnp.ones_like, params)
    broken = {"embedding": good["embedding"].at[0, 0].set(bad), "layers": good["layers"]}
    _, once = optimizer.update(good, optimizer.init(params), params)
    updates, after = optimizer.update(broken, once, params)
    assert not any(u.any() for u in jax.tree.leaves(updates))
    assert skipped_updates(after) == 1
    want, _ = optimizer.update(good, once, params)
    got, last = optimizer.update(good, after, params)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert skipped_updates(last) == 1
    assert [applied_updates(state) for state in (once, after, last)] == [1, 1, 2]


def test_adamw_equals_optax_adamw():
    params, grads = {"layers": {"gate": jnp.ones((1, 2, 2))}}, {"layers": {"gate": jnp.full((1, 2, 2), 0.3)}}
    ours = make_optimizer(OptimConfig(name="adamw", lr=0.01, b2=0.95, clip_norm=None))
    theirs = optax.adamw(0.01, b2=0.95, weight_decay=0.0)
    got, _ = ours.update(grads, ours.init(params), params)
    want, _ = theirs.update(grads, theirs.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "lion"}, ["optim.name", "lion", "adamw"]),
        ({"schedule": "step"}, ["optim.schedule", "step", "cosine"]),
        ({"warmup_ratio": 0.5, "warmup_steps": 3}, ["warmup_ratio", "warmup_steps"]),
        ({"warmup_ratio": 95}, ["warmup_ratio", "95"]),
        ({"b1": 1.5}, ["optim.b1=1.5", "at most 1"]),
        ({"b2": 1.0}, ["optim.b2=1", "below 1"]),
        ({"eps": 0.0}, ["optim.eps=0", "above 0"]),
        ({"final_ratio": 7.0}, ["optim.final_ratio=7.0", "at most 1"]),
        ({"clip_norm": -1.0}, ["optim.clip_norm=-1.0", "at least 0"]),
        ({"adam_lr": -1.0}, ["optim.adam_lr=-1.0", "at least 0"]),
        ({"eps": float("nan")}, ["optim.eps=nan", "at least 0"]),
        ({"frozen": ("[",)}, ["optim.frozen", "'['", "not a regular expression"]),
    ],
)
def test_invalid_fields_are_refused(fields, words):
    with pytest.raises(UserError) as error:
        OptimConfig(**fields)
    assert all(w in str(error.value) for w in words)


class Toy(nnx.Module):
    def __init__(self, adapters=False):
        self.embedding = nnx.Param(jnp.ones(3))
        self.q, self.q_bias = nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))
        if adapters:
            self.q_lora_a, self.q_lora_b = nnx.LoRAParam(jnp.ones(1)), nnx.LoRAParam(jnp.ones(1))


@pytest.mark.parametrize(
    ("adapters", "frozen", "trained"),
    [
        (False, (), {"embedding", "q", "q_bias"}),
        (False, ("^embedding$", "bias"), {"q"}),
        (True, (), {"q_lora_a", "q_lora_b"}),
        (True, ("^embedding$", "lora_a"), {"q_lora_b"}),
    ],
)
def test_only_adapters_are_trained_if_there_are_any_and_frozen_parameters_never(adapters, frozen, trained):
    toy = Toy(adapters)
    graph, params, fixed = split_trained(toy, frozen)
    assert {path[0] for path, _ in nnx.to_flat_state(params)} == trained
    assert len(jax.tree.leaves(params)) + len(jax.tree.leaves(fixed)) == len(jax.tree.leaves(nnx.state(toy)))
    again = nnx.merge(graph, params, fixed)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(toy))


def test_a_frozen_pattern_that_matches_nothing_is_refused():
    with pytest.raises(
        UserError, match=r"optim.frozen=\['head'\] match no parameter; the parameters are embedding, q"
    ):
        split_trained(Toy(), ("embedding", "head"))


def test_the_running_mean_equals_the_mean():
    trees = [{"a": jnp.arange(3.0) * i, "b": {"c": jnp.float32(i) ** 2}} for i in range(1, 6)]
    mean = jax.tree.map(jnp.ones_like, trees[0])  # has no weight in the mean
    for count, tree in enumerate(trees, 1):
        mean = running_mean(mean, tree, count)
    np.testing.assert_allclose(mean["a"], np.arange(3) * 3, rtol=1e-6)
    np.testing.assert_allclose(mean["b"]["c"], 11, rtol=1e-6)
