"""The policy update: any split into microbatches gives the same step, and only policy tokens get a gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Trajectory
from rrl.errors import UserError
from rrl.models.decoder import Decoder
from rrl.models.lora import LoraConfig, add_lora
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard, shardings
from rrl.rl.logprobs import token_logprobs
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig, make_optimizer, split_trained
from rrl.rl.packing import pack
from rrl.rl.update import Updater, pack_minibatch
from tests.tiny import tiny_shape

CONFIG = tiny_shape(50, 256, num_hidden_layers=2)


@functools.cache
def _drawn():
    return nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0)))


def fresh() -> Decoder:
    """The same decoder each time, in new buffers, because an update donates them."""
    graph, state = _drawn()
    return nnx.merge(graph, jax.tree.map(jnp.copy, state))


def make(seed: int, length: int, group: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    roles = np.array(
        [PROMPT] * 4 + [POLICY] * (length // 2) + [ENVIRONMENT] * 3 + [POLICY] * (length - length // 2)
    )
    logps = np.where(roles == POLICY, -rng.random(len(roles)) - 3.5, 0).astype(np.float32)
    tokens = rng.integers(0, 50, len(roles)).astype(np.int32)
    turns = np.zeros(len(roles), np.int16)
    return Trajectory(
        Question("q", "", ("a",)), seed, group, tokens, roles, logps, logps, turns, [], [], "answer"
    )


TRAJECTORIES = [make(seed, 5 + 7 * (seed % 6), seed // 4) for seed in range(16)]
ADVANTAGES = np.random.default_rng(9).normal(size=16).astype(np.float32)


def made(objective: ObjectiveConfig, decoder=None, frozen=(), place=lambda x: x):
    """An updater, (trained, reference, frozen parameters), and the optimiser."""
    graph, params, fixed = split_trained(decoder or fresh(), frozen)
    reference = place(jax.tree.map(lambda x: x * 1.05, params))
    optimizer = make_optimizer(OptimConfig(name="sgd", lr=0.1, b1=0.0, clip_norm=None, total_steps=10))
    return Updater(graph, optimizer, objective), (place(params), reference, place(fixed)), optimizer


def step(objective: ObjectiveConfig, trajectories=TRAJECTORIES, advantages=ADVANTAGES, calls=1, **how):
    updater, (params, reference, fixed), optimizer = made(objective, **how)
    state = optimizer.init(params)
    for _ in range(calls):
        params, state, metrics = updater(params, state, reference, fixed, trajectories, advantages)
    return params, metrics | {"steps": int(optax.tree_utils.tree_get(state, "count"))}


def close(first, second, tolerance=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), first, second)


TOKENS = [np.random.default_rng(t.request).normal(size=len(t.tokens)) for t in TRAJECTORIES]
"""An advantage per token, as from GAE."""

SPLITS = {
    "token_mean": (ObjectiveConfig(kl_coef=0.1), ADVANTAGES),
    "sequence_mean": (ObjectiveConfig(kl_coef=0.1, aggregation="sequence_mean"), ADVANTAGES),
    "per-token advantages, every option": (
        ObjectiveConfig(
            kl_coef=0.1,
            kl_estimator="k2",
            dual_clip=1.5,
            entropy_coef=0.1,
            importance_cap=1.1,
            aggregation="group_token_mean",
        ),
        TOKENS,
    ),
}


@pytest.mark.slow
def test_an_update_donates_the_parameters_and_keeps_the_reference():
    updater, (params, reference, fixed), optimizer = made(ObjectiveConfig())
    state = optimizer.init(params)
    updater(params, state, reference, fixed, TRAJECTORIES, ADVANTAGES)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((reference, fixed)))


@pytest.mark.parametrize("name", SPLITS)
def test_any_split_into_microbatches_and_any_packing_gives_the_same_step(name):
    # SGD with learning rate 0.1: gradients agree to 1e-5.
    objective, advantages = SPLITS[name]
    whole = dataclasses.replace(objective, row_lengths=(64,), microbatch_tokens=4096)
    split = dataclasses.replace(objective, row_lengths=(32, 64), microbatch_tokens=64)
    (one, first), (other, second) = step(whole, advantages=advantages), step(split, advantages=advantages)
    close(one, other)
    for metric, value in first.items():
        np.testing.assert_allclose(value, second[metric], rtol=1e-4, atol=1e-6)


def test_the_gradient_equals_that_of_whole_logits_without_packing():
    """An independent implementation of GRPO with k3, without packing, chunks or microbatches."""
    width = max(len(t.tokens) for t in TRAJECTORIES)
    tokens, mask, old = (np.zeros((len(TRAJECTORIES), width), d) for d in (np.int32, np.float32, np.float32))
    for row, t in enumerate(TRAJECTORIES):
        tokens[row, : len(t.tokens)], old[row, : len(t.tokens)] = t.tokens, t.logps
        mask[row, : len(t.tokens)] = t.roles == POLICY
    graph, params = nnx.split(fresh())

    def logps(state):
        decoder = nnx.merge(graph, state)
        hidden = decoder(tokens, positions=jnp.broadcast_to(jnp.arange(width), tokens.shape))
        whole = jax.nn.log_softmax(decoder.unembed(hidden), -1)
        return jnp.pad(jnp.take_along_axis(whole[:, :-1], tokens[:, 1:, None], -1)[..., 0], ((0, 0), (1, 0)))

    def loss(state):
        now, before = logps(state), logps(jax.tree.map(lambda x: x * 1.05, params))
        ratio, advantage = jnp.exp(now - old), ADVANTAGES[:, None]
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.28) * advantage)
        kl = jnp.exp(before - now) - (before - now) - 1
        return (mask * (0.1 * kl - surrogate)).sum() / mask.sum()

    gradient = jax.jit(jax.grad(loss))(params)
    found, _ = step(ObjectiveConfig(kl_coef=0.1, clip_high=0.28, row_lengths=(64,)))
    close(jax.tree.map(lambda new, start: (start - new) / 0.1, found, params), gradient, 1e-5)


def test_equal_advantages_per_token_and_per_trajectory_give_the_same_step():
    objective = ObjectiveConfig(kl_coef=0.0, row_lengths=(64,))
    scalar, _ = step(objective)
    tokens = [np.where(t.roles == POLICY, a, 99.0) for t, a in zip(TRAJECTORIES, ADVANTAGES, strict=True)]
    each, _ = step(objective, advantages=tokens)
    close(scalar, each, 0)


def joined(first: Trajectory, second: Trajectory) -> Trajectory:
    """One trajectory with two contexts: those of two trajectories."""
    arrays = ("tokens", "roles", "logps", "sampled_logps", "turns")
    both = {name: np.concatenate([getattr(t, name) for t in (first, second)]) for name in arrays}
    return dataclasses.replace(first, **both, starts=(0, len(first.tokens)))


def test_each_context_of_a_trajectory_is_a_separate_sequence():
    pairs = [joined(*TRAJECTORIES[at : at + 2]) for at in range(0, 16, 2)]
    objective = ObjectiveConfig(kl_coef=0.1, row_lengths=(16, 32, 64), microbatch_tokens=128)
    separate, _ = step(objective, advantages=np.repeat(ADVANTAGES[:8], 2))
    together, _ = step(objective, pairs, ADVANTAGES[:8])
    close(separate, together)
    updater, (params, _, fixed), _ = made(objective)
    scores, single = (updater.logps(params, fixed, ts)["logp"] for ts in (pairs, TRAJECTORIES))
    for score, *parts in zip(scores, single[::2], single[1::2], strict=True):
        np.testing.assert_allclose(score, np.concatenate(parts), atol=1e-6)


def test_every_epoch_uses_the_same_old_log_probabilities_and_advantages():
    objective = ObjectiveConfig(kl_coef=0.1, row_lengths=(64,))
    twice, metrics = step(dataclasses.replace(objective, epochs=2))
    assert metrics["steps"] == 2
    close(twice, step(objective, calls=2)[0], 0)


@functools.cache
def plain():
    """An updater whose compiled programs several tests share; callers must copy its parameters."""
    return made(ObjectiveConfig(kl_coef=0.0, row_lengths=(64,)))


def steps_of(trajectories, advantages, **config):
    """Updates with `plain`, with other epochs or minibatches, which do not change its programs."""
    updater, (params, reference, fixed), optimizer = plain()
    updater.config = dataclasses.replace(updater.config, epochs=1, minibatches=1)
    updater.config = dataclasses.replace(updater.config, **config)
    params = jax.tree.map(jnp.copy, params)
    return updater(params, optimizer.init(params), reference, fixed, trajectories, advantages)


def test_logp_gap_is_measured_before_the_first_step_and_step_kl_after_it():
    updater, (params, _, fixed), _ = plain()
    start = updater.logps(params, fixed, TRAJECTORIES)["logp"]
    same = [dataclasses.replace(t, logps=logp) for t, logp in zip(TRAJECTORIES, start, strict=True)]
    moved, _, once = steps_of(same, ADVANTAGES)
    *_, twice = steps_of(same, ADVANTAGES, epochs=2)
    assert once["sampling_logp_diff"] < 1e-6 and twice["sampling_logp_diff"] < 1e-6
    # k3 by hand: 0 in the first step; in the second step it measures the first one.
    now = updater.logps(moved, fixed, TRAJECTORIES)["logp"]
    own = [t.roles == POLICY for t in TRAJECTORIES]
    change = np.concatenate([(n - s)[m] for n, s, m in zip(now, start, own, strict=True)])
    assert abs(once["approx_kl"]) < 1e-6 < np.abs(change).max()
    np.testing.assert_allclose(
        twice["approx_kl"], (np.exp(change) - change - 1).mean() / 2, rtol=1e-3, atol=1e-7
    )


def test_metrics_leave_out_minibatches_with_a_non_finite_gradient():
    bad = np.where(np.arange(16) < 8, np.nan, ADVANTAGES).astype(np.float32)  # groups 0 and 1
    found, _, metrics = steps_of(TRAJECTORIES, bad, minibatches=2)
    good, _, alone = steps_of(TRAJECTORIES[8:], ADVANTAGES[8:])
    close(found, good, 0)
    assert (metrics["skipped"], alone["skipped"]) == (1, 0)
    for name in ("loss", "entropy", "kl", "ratio", "grad_norm"):
        np.testing.assert_allclose(metrics[name], alone[name], rtol=1e-6, err_msg=name)


def test_with_truncated_importance_the_ratio_starts_at_1_and_the_loss_is_weighted():
    objective = ObjectiveConfig(kl_coef=0.0, row_lengths=(64,), importance_cap=1.0)
    updater, (params, _, fixed), _ = made(objective)
    scores = updater.logps(params, fixed, TRAJECTORIES)["logp"]
    own = [t.roles == POLICY for t in TRAJECTORIES]
    gaps = [now[m] - t.sampled_logps[m] for now, t, m in zip(scores, TRAJECTORIES, own, strict=True)]
    _, metrics = step(objective)
    np.testing.assert_allclose(metrics["ratio"], 1, rtol=1e-6)
    np.testing.assert_allclose(metrics["sampling_logp_diff"], np.abs(np.concatenate(gaps)).mean(), rtol=1e-5)
    np.testing.assert_allclose(
        metrics["importance"], np.minimum(np.exp(np.concatenate(gaps)), 1).mean(), rtol=1e-5
    )


def test_the_kl_in_the_reward_is_summed_from_each_token_on_and_then_whitened():
    objective = ObjectiveConfig(kl_coef=0.5, kl_estimator="k1", kl_in="reward", row_lengths=(16, 32, 64))
    updater, (_, reference, fixed), _ = made(objective)
    before = updater.logps(reference, fixed, TRAJECTORIES)["logp"]
    reference_logprobs = updater.reference_logprobs(reference, fixed, TRAJECTORIES)
    found = updater.token_advantages(TRAJECTORIES, ADVANTAGES, reference_logprobs)
    wanted = []
    for t, advantage, ref in zip(TRAJECTORIES, ADVANTAGES, before, strict=True):
        own = np.flatnonzero(t.roles == POLICY).tolist()
        to_come = {s: sum(float(t.logps[u] - ref[u]) for u in own if u >= s) for s in own}
        wanted.append([float(advantage) - 0.5 * to_come[s] for s in own])
    for t, tokens, one in zip(TRAJECTORIES, found, wanted, strict=True):
        np.testing.assert_allclose(tokens[t.roles == POLICY], one, rtol=1e-4, atol=1e-4)
    white = made(dataclasses.replace(objective, whiten=True))[0]
    every = np.concatenate(wanted)
    for t, tokens, one in zip(
        TRAJECTORIES,
        white.token_advantages(TRAJECTORIES, ADVANTAGES, reference_logprobs),
        wanted,
        strict=True,
    ):
        np.testing.assert_allclose(
            tokens[t.roles == POLICY], (one - every.mean()) / every.std(), rtol=1e-3, atol=1e-4
        )


@pytest.mark.slow
def test_with_the_kl_in_the_reward_the_update_reuses_the_references_log_probabilities():
    objective = ObjectiveConfig(
        kl_coef=0.5, kl_estimator="k1", kl_in="reward", row_lengths=(64,), minibatches=2
    )
    updater, (params, reference, fixed), optimizer = made(objective)
    reference_logprobs = updater.reference_logprobs(reference, fixed, TRAJECTORIES)
    nothing = jax.tree.map(lambda x: x * np.nan, reference)
    state = optimizer.init(params)
    found, _, metrics = updater(params, state, nothing, fixed, TRAJECTORIES, ADVANTAGES, reference_logprobs)
    expected, expected_metrics = step(objective)
    close(found, expected, 0)
    # The loss then has no KL term, so its gradient equals that without KL; the kl metric is still reported.
    without_kl, metrics_without_kl = step(dataclasses.replace(objective, kl_coef=0.0))
    close(found, without_kl)
    for name in ("kl", "loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(
            metrics[name], metrics_without_kl[name], rtol=1e-4, atol=1e-7, err_msg=name
        )


def test_token_advantages_are_unchanged_without_kl_in_the_reward_and_whitening():
    updater, (_, reference, fixed), _ = made(ObjectiveConfig(row_lengths=(64,)))
    reference_logprobs = updater.reference_logprobs(reference, fixed, TRAJECTORIES)
    assert (
        reference_logprobs is None
        and updater.token_advantages(TRAJECTORIES, ADVANTAGES, reference_logprobs) is ADVANTAGES
    )


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_sharded_step_equals_that_of_one_device_and_keeps_the_shardings(kl_in):
    objective = ObjectiveConfig(kl_coef=0.1, kl_in=kl_in, row_lengths=(64,), microbatch_tokens=256)
    one, first = step(objective)
    mesh = make_mesh(1, 4, 2)
    with jax.set_mesh(mesh):
        other, second = step(objective, place=lambda state: shard(state, mesh))
    close(one, other, 1e-5)
    np.testing.assert_allclose(first["loss"], second["loss"], atol=1e-5)
    placed = shardings(other, mesh)
    for path, variable in nnx.to_flat_state(other):
        assert variable[...].sharding.is_equivalent_to(placed[path], variable[...].ndim), path


def test_observation_tokens_get_no_gradient():
    # Without the policy tokens after it, the tokens of the last observation must not matter.
    def cut(t: Trajectory, swap: bool) -> Trajectory:
        end = int(np.flatnonzero(t.roles == ENVIRONMENT)[-1]) + 1
        tokens = t.tokens[:end].copy()
        if swap:
            tokens[-3:] = 7
        return dataclasses.replace(
            t,
            tokens=tokens,
            roles=t.roles[:end],
            logps=t.logps[:end],
            sampled_logps=t.logps[:end],
            turns=t.turns[:end],
        )

    objective = ObjectiveConfig(kl_coef=0.1, row_lengths=(64,))
    plain, _ = step(objective, [cut(t, False) for t in TRAJECTORIES])
    swapped, _ = step(objective, [cut(t, True) for t in TRAJECTORIES])
    close(plain, swapped, 1e-7)


def test_without_advantage_and_kl_the_parameters_stay():
    _graph, params = nnx.split(fresh())
    new, metrics = step(ObjectiveConfig(kl_coef=0.0, row_lengths=(64,)), advantages=np.zeros(16, np.float32))
    close(new, params, 0)
    assert metrics["grad_norm"] == 0


def test_freezing_some_parameters_does_not_change_the_step_of_the_others():
    objective = ObjectiveConfig(kl_coef=0.0, row_lengths=(64,))
    whole, _ = step(objective)
    part, _ = step(objective, frozen=("^embedding$", "norm"))
    names = {path for path, _ in nnx.to_flat_state(part)}
    assert ("embedding",) not in names and ("layers", "q") in names
    everything = dict(nnx.to_flat_state(whole))
    for path, leaf in nnx.to_flat_state(part):
        np.testing.assert_allclose(leaf[...], everything[path][...], atol=1e-7)


def test_with_adapters_only_the_adapters_are_trained():
    decoder = fresh()
    add_lora(decoder, LoraConfig(rank=2), rngs=nnx.Rngs(1))
    before = jax.tree.map(jnp.copy, nnx.state(decoder, nnx.LoRAParam))
    new, metrics = step(ObjectiveConfig(kl_coef=0.0, row_lengths=(64,)), decoder=decoder)
    assert jax.tree.structure(new) == jax.tree.structure(before) and metrics["grad_norm"] > 0
    moved = {path[-1]: float(jnp.abs(leaf[...]).max()) for path, leaf in nnx.to_flat_state(new)}
    assert all(size > 0 for name, size in moved.items() if name.endswith("_lora_b"))


def test_bfloat16_master_weights_are_updated_in_bfloat16():
    """Adam's moments have the parameters' dtype too."""
    decoder = fresh()
    nnx.update(decoder, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(decoder)))
    graph, params, fixed = split_trained(decoder, ())
    reference, optimizer = jax.tree.map(jnp.copy, params), make_optimizer(OptimConfig(lr=1e-2, total_steps=9))
    state, objective = optimizer.init(params), ObjectiveConfig(row_lengths=(64,))
    new, state, metrics = Updater(graph, optimizer, objective)(
        params, state, reference, fixed, TRAJECTORIES, ADVANTAGES
    )
    floats = [
        leaf.dtype for leaf in jax.tree.leaves((new, state)) if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    assert set(floats) == {jnp.dtype(jnp.bfloat16)} and metrics["skipped"] == 0
    assert not all(jax.tree.leaves(jax.tree.map(jnp.array_equal, new, reference)))


def test_a_step_raises_the_likelihood_of_positive_advantages_and_lowers_that_of_negative_ones():
    def likelihood(params, trajectory):
        decoder = nnx.merge(nnx.split(fresh())[0], params)
        batch = pack([trajectory.tokens], [trajectory.roles == POLICY], 64).batch
        return float(token_logprobs(decoder, jax.tree.map(jnp.asarray, batch)).logp.sum())

    start = nnx.state(fresh())
    pair = [make(1, 12, 0), make(2, 12, 0)]
    for t in pair:  # on policy, so the ratio starts at 1
        batch = jax.tree.map(jnp.asarray, pack([t.tokens], [t.roles == POLICY], 64).batch)
        t.logps = np.asarray(token_logprobs(fresh(), batch).logp)[0, : len(t.tokens)]
    new, _ = step(ObjectiveConfig(kl_coef=0.0, row_lengths=(64,)), pair, np.array([1.0, -1.0], np.float32))
    assert likelihood(new, pair[0]) > likelihood(start, pair[0])
    assert likelihood(new, pair[1]) < likelihood(start, pair[1])


@pytest.mark.parametrize(("minibatches", "steps"), [(1, 1), (3, 3), (9, 4)])
def test_each_minibatch_is_one_optimiser_step_on_at_least_one_group(minibatches, steps):
    # microbatches of one row, whose number must not matter
    objective = ObjectiveConfig(kl_coef=0.0, row_lengths=(64,), microbatch_tokens=64, minibatches=minibatches)
    assert step(objective)[1]["steps"] == steps


def test_every_trajectory_is_packed_once_and_batches_have_the_configured_shapes():
    objective = ObjectiveConfig(row_lengths=(16, 32, 64), microbatch_tokens=64)
    batches, total = pack_minibatch(TRAJECTORIES, ADVANTAGES, objective)
    assert sum(int(b.loss_mask.sum()) for b in batches) == total == sum(t.policy_tokens for t in TRAJECTORIES)
    assert {b.tokens.shape for b in batches} <= {(4, 16), (2, 32), (1, 64)}


def test_a_trajectory_longer_than_the_longest_row_is_refused():
    with pytest.raises(UserError, match=r"objective\.row_lengths"):
        pack_minibatch(TRAJECTORIES, ADVANTAGES, ObjectiveConfig(row_lengths=(16,)))
