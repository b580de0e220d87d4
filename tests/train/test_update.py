"""The update: any split into microbatches gives the same step, and only policy tokens matter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.lora import LoraConfig, add_lora
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard, shardings
from rrl.rl.logprobs import token_logprobs
from rrl.rl.optim import OptimConfig, make_optimizer, split_trained
from rrl.rollout.trajectory import ENVIRONMENT, POLICY, PROMPT, Trajectory
from rrl.train.objective import ObjectiveConfig
from rrl.train.pack import pack
from rrl.train.update import Updater, microbatches

CONFIG = DecoderConfig.from_hf(
    {
        "model_type": "qwen2",
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 256,
    }
)


@functools.cache
def _drawn():
    return nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0)))


def fresh() -> Decoder:
    """The same decoder each time, in buffers of its own: an update donates them."""
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


def step(
    objective: ObjectiveConfig,
    trajectories=TRAJECTORIES,
    advantages=ADVANTAGES,
    decoder=None,
    frozen=(),
    place=lambda x: x,
):
    graph, params, fixed = split_trained(decoder or fresh(), frozen)
    params, reference, fixed = place(params), place(jax.tree.map(lambda x: x * 1.05, params)), place(fixed)
    optimizer = make_optimizer(OptimConfig(name="sgd", lr=0.1, b1=0.0, clip_norm=None, total_steps=10))
    updater = Updater(graph, optimizer, objective)
    new, state, metrics = updater(params, optimizer.init(params), reference, fixed, trajectories, advantages)
    return new, metrics | {"steps": int(optax.tree_utils.tree_get(state, "count"))}


def close(first, second, tolerance=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), first, second)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_any_split_into_microbatches_gives_the_same_step(aggregation):
    whole = ObjectiveConfig(kl_coef=0.1, lengths=(64,), microbatch_tokens=4096, aggregation=aggregation)
    split = dataclasses.replace(whole, lengths=(16, 32, 64), microbatch_tokens=64)
    (one, first), (other, second) = step(whole), step(split)
    close(one, other)
    for name, value in first.items():
        np.testing.assert_allclose(value, second[name], rtol=1e-4, atol=1e-6)


def test_a_sharded_step_is_the_step_of_one_device_and_leaves_parameters_where_they_were():
    objective = ObjectiveConfig(kl_coef=0.1, lengths=(64,), microbatch_tokens=256)
    one, first = step(objective)
    mesh = make_mesh(1, 4, 2)
    with jax.set_mesh(mesh):
        other, second = step(objective, place=lambda state: shard(state, mesh))
    close(one, other, 1e-5)
    np.testing.assert_allclose(first["loss"], second["loss"], atol=1e-5)
    placed = shardings(other, mesh)
    for path, variable in nnx.to_flat_state(other):
        assert variable[...].sharding.is_equivalent_to(placed[path], variable[...].ndim), path


def test_microbatches_hold_the_same_number_of_rows_on_each_shard_and_at_least_one():
    objective = ObjectiveConfig(microbatch_tokens=32768)
    assert (objective.rows(8192), objective.rows(8192, 4), objective.rows(8192, 16)) == (4, 4, 16)
    assert objective.rows(2048, 3) == 15


def test_environment_tokens_change_nothing_but_their_context():
    # The last observation is followed by policy tokens; drop those, and its own identity no longer matters.
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

    objective = ObjectiveConfig(kl_coef=0.1, lengths=(64,))
    plain, _ = step(objective, [cut(t, False) for t in TRAJECTORIES])
    swapped, _ = step(objective, [cut(t, True) for t in TRAJECTORIES])
    close(plain, swapped, 1e-7)


def test_without_advantage_and_kl_nothing_moves():
    _graph, params = nnx.split(fresh())
    new, metrics = step(ObjectiveConfig(kl_coef=0.0, lengths=(64,)), advantages=np.zeros(16, np.float32))
    close(new, params, 0)
    assert metrics["grad_norm"] == 0


def test_freezing_some_parameters_leaves_the_step_of_the_others_as_it_was():
    objective = ObjectiveConfig(kl_coef=0.0, lengths=(64,))
    whole, _ = step(objective)
    part, _ = step(objective, frozen=("^embedding$", "norm"))
    names = {path for path, _ in nnx.to_flat_state(part)}
    assert ("embedding",) not in names and ("layers", "q") in names
    everything = dict(nnx.to_flat_state(whole))
    for path, leaf in nnx.to_flat_state(part):
        np.testing.assert_allclose(leaf[...], everything[path][...], atol=1e-7)


def test_adapters_learn_beside_a_policy_that_stays():
    decoder = fresh()
    add_lora(decoder, LoraConfig(rank=2), rngs=nnx.Rngs(1))
    before = jax.tree.map(jnp.copy, nnx.state(decoder, nnx.LoRAParam))
    new, metrics = step(ObjectiveConfig(kl_coef=0.0, lengths=(64,)), decoder=decoder)
    assert jax.tree.structure(new) == jax.tree.structure(before) and metrics["grad_norm"] > 0
    moved = {path[-1]: float(jnp.abs(leaf[...]).max()) for path, leaf in nnx.to_flat_state(new)}
    assert all(size > 0 for name, size in moved.items() if name.endswith("_lora_b"))


def test_a_step_raises_what_had_advantage_and_lowers_what_had_none():
    def likelihood(params, trajectory):
        decoder = nnx.merge(nnx.split(fresh())[0], params)
        batch = pack([trajectory.tokens], [trajectory.roles == POLICY], 64).batch
        return float(token_logprobs(decoder, jax.tree.map(jnp.asarray, batch)).logp.sum())

    start = nnx.state(fresh())
    pair = [make(1, 12, 0), make(2, 12, 0)]
    for t in pair:  # on policy: the ratio starts at 1
        batch = jax.tree.map(jnp.asarray, pack([t.tokens], [t.roles == POLICY], 64).batch)
        t.logps = np.asarray(token_logprobs(fresh(), batch).logp)[0, : len(t.tokens)]
    new, _ = step(ObjectiveConfig(kl_coef=0.0, lengths=(64,)), pair, np.array([1.0, -1.0], np.float32))
    assert likelihood(new, pair[0]) > likelihood(start, pair[0])
    assert likelihood(new, pair[1]) < likelihood(start, pair[1])


@pytest.mark.parametrize(("minibatches", "steps"), [(1, 1), (3, 3), (9, 4)])
def test_each_minibatch_is_one_optimiser_step_on_a_group_or_more(minibatches, steps):
    # microbatches of one row: their number does not count
    objective = ObjectiveConfig(kl_coef=0.0, lengths=(64,), microbatch_tokens=64, minibatches=minibatches)
    assert step(objective)[1]["steps"] == steps


def test_every_trajectory_is_packed_once_and_only_the_last_length_is_padded():
    objective = ObjectiveConfig(lengths=(16, 32, 64), microbatch_tokens=64)
    batches, total = microbatches(TRAJECTORIES, ADVANTAGES, objective)
    assert sum(int(b.loss.sum()) for b in batches) == total == sum(t.policy_tokens for t in TRAJECTORIES)
    assert {b.tokens.shape for b in batches} <= {(4, 16), (2, 32), (1, 64)}


def test_a_trajectory_longer_than_every_length_is_refused():
    with pytest.raises(UserError, match=r"objective\.lengths"):
        microbatches(TRAJECTORIES, ADVANTAGES, ObjectiveConfig(lengths=(16,)))
