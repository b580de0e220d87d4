"""The critic: packing does not change advantages, and values are trained on policy tokens only."""

import dataclasses
import statistics
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.data.trajectory import POLICY
from rrl.errors import UserError
from rrl.models.config import DecoderConfig
from rrl.models.heads import ValueModel
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.rl.critic import CriticConfig, make_critic
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig
from tests.rl.sharded_step import trajectory

SHAPE = DecoderConfig(vocab_size=97, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=24)
OBJECTIVE = ObjectiveConfig(row_lengths=(64,), microbatch_tokens=1024)
SPLIT = dataclasses.replace(OBJECTIVE, row_lengths=(24, 64), microbatch_tokens=64)
SGD = OptimConfig(name="sgd", lr=0.1, b1=0.0, clip_norm=None, total_steps=10)
CONFIG = CriticConfig(SGD, discount=0.9, gae_lambda=0.8)

TRAJECTORIES = [trajectory(seed) for seed in range(8)]
for one in TRAJECTORIES:
    one.rewards["total"] = float(one.request % 3)
OWN = [np.flatnonzero(t.roles == POLICY).tolist() for t in TRAJECTORIES]
PENALTIES = [0.1 * np.random.default_rng(t.request).random(len(t.tokens)) for t in TRAJECTORIES]


def model() -> ValueModel:
    """A value model with random parameters, including the output, drawn without compiling anything."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: ValueModel(SHAPE, rngs=nnx.Rngs(0))))
    draws = np.random.default_rng(0)
    return nnx.merge(
        graph, jax.tree.map(lambda x: jnp.asarray(draws.normal(0, 0.3, x.shape), x.dtype), shapes)
    )


@pytest.fixture(scope="module")
def alone():
    """The value after each token of each trajectory, computed without packing."""
    width = max(len(t.tokens) for t in TRAJECTORIES)
    tokens = np.array([np.pad(t.tokens, (0, width - len(t.tokens))) for t in TRAJECTORIES])
    positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    return np.asarray(nnx.jit(lambda critic: critic.values(tokens, positions=positions))(model()))


@pytest.mark.parametrize("objective", [OBJECTIVE, SPLIT], ids=["one length", "two lengths"])
def test_advantages_equal_loops_over_each_trajectory(alone, objective):
    critic, state = make_critic(model(), CONFIG, objective)
    found = critic.estimate(state, TRAJECTORIES, PENALTIES)
    for row, (t, own) in enumerate(zip(TRAJECTORIES, OWN, strict=True)):
        value = {s: float(alone[row, s - 1]) for s in own}  # V of the state before the token
        advantage, following = 0.0, 0.0
        for s in reversed(own):
            reward = -PENALTIES[row][s] + (t.rewards["total"] if s == own[-1] else 0.0)
            advantage = reward + 0.9 * following - value[s] + 0.9 * 0.8 * advantage
            following = value[s]
            np.testing.assert_allclose(found.advantages[row][s], advantage, atol=1e-5)
            np.testing.assert_allclose(found.returns[row][s], advantage + value[s], atol=1e-5)
            np.testing.assert_allclose(found.values[row][s], value[s], atol=1e-5)


def test_parallel_microbatches_give_the_same_values_from_several_threads(monkeypatch):
    monkeypatch.setattr("rrl.parallel.threads.available_cores", lambda: 2)
    found, names = [], set[str]()
    for parallel in (1, 2):
        critic, state = make_critic(
            model(), CONFIG, dataclasses.replace(SPLIT, parallel_microbatches=parallel)
        )
        program = critic._token_values.program

        def watched(*given, program=program):
            names.add(threading.current_thread().name.partition("_")[0])
            return program(*given)

        critic._token_values.program = watched
        found.append(critic.estimate(state, TRAJECTORIES))
    assert names == {"MainThread", "rrl-microbatch"}
    for one, other in zip(found[0].values, found[1].values, strict=True):
        np.testing.assert_array_equal(one, other)


def two_contexts():
    """A trajectory whose contexts are the first two of `TRAJECTORIES`, and the start of the second context."""
    first, second = TRAJECTORIES[0], TRAJECTORIES[1]
    names = ("tokens", "roles", "logps", "sampled_logps", "turns")
    joined = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in names}
    size = len(first.tokens)
    joined["turns"] = np.repeat([0, 1], [size, len(second.tokens)])
    return dataclasses.replace(first, **joined, starts=(0, size), turn_rewards={0: 0.8, 1: 2.0}), size


def test_each_context_is_a_separate_episode_by_default(alone):
    # R3-RAG (SPEC.md 6): gamma = lambda = 1 within a step, and a reward does not reach other steps.
    one, size = two_contexts()
    critic, state = make_critic(model(), CriticConfig(SGD), OBJECTIVE)
    (found,) = critic.estimate(state, [one]).advantages
    for row, (own, reward, start) in enumerate(zip(OWN, (0.8, 2.0), (0, size))):
        for s in own:
            np.testing.assert_allclose(found[start + s], reward - alone[row, s - 1], atol=1e-5)


def test_across_contexts_a_step_is_credited_with_later_rewards(alone):
    # R3-RAG, Eq. 8: rewards of later steps count.
    one, size = two_contexts()
    critic, state = make_critic(model(), dataclasses.replace(CONFIG, across_contexts=True), OBJECTIVE)
    found = critic.estimate(state, [one, TRAJECTORIES[2]])
    paid, advantage, following = {OWN[0][-1]: 0.8, size + OWN[1][-1]: 2.0}, 0.0, 0.0
    tokens = [(s, alone[0, s - 1]) for s in OWN[0]] + [(size + s, alone[1, s - 1]) for s in OWN[1]]
    for place, value in reversed(tokens):
        advantage = paid.get(place, 0.0) + 0.9 * following - value + 0.9 * 0.8 * advantage
        following = value
        np.testing.assert_allclose(found.advantages[0][place], advantage, atol=1e-5)
        np.testing.assert_allclose(found.returns[0][place], advantage + value, atol=1e-5)
    (single,) = make_critic(model(), CONFIG, OBJECTIVE)[0].estimate(state, [TRAJECTORIES[2]]).advantages
    np.testing.assert_allclose(found.advantages[1], single, atol=1e-6)


def test_any_split_into_microbatches_gives_the_same_step_and_metrics_of_the_old_values():
    after = []
    for objective in (OBJECTIVE, SPLIT):
        critic, state = make_critic(model(), CONFIG, objective)
        estimate = critic.estimate(state, TRAJECTORIES)
        after.append(critic.update(state, TRAJECTORIES, estimate))
    (one, first), (other, second) = after
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one[0], other[0])
    for name, value in first.items():
        np.testing.assert_allclose(value, second[name], rtol=1e-4, atol=1e-6, err_msg=name)
    returns = [float(r[s]) for r, own in zip(estimate.returns, OWN, strict=True) for s in own]
    values = [float(v[s]) for v, own in zip(estimate.values, OWN, strict=True) for s in own]
    errors = [r - v for r, v in zip(returns, values, strict=True)]
    wanted = 1 - statistics.pvariance(errors) / statistics.pvariance(returns)
    np.testing.assert_allclose(first["explained_variance"], wanted, rtol=1e-3)
    np.testing.assert_allclose(first["value"], statistics.mean(values), rtol=1e-4)
    np.testing.assert_allclose(first["loss"], statistics.mean(e * e / 2 for e in errors), rtol=1e-4)


def test_explained_variance_rises_in_training():
    adam = OptimConfig(lr=3e-2, total_steps=100)
    critic, state = make_critic(model(), CriticConfig(adam, clip=None, epochs=2, minibatches=2), OBJECTIVE)
    explained = []
    for _ in range(8):
        state, metrics = critic.update(state, TRAJECTORIES, critic.estimate(state, TRAJECTORIES))
        explained.append(metrics["explained_variance"])
    assert explained[0] < 0.2 < 0.6 < explained[-1]


def test_minibatches_have_about_equally_many_tokens(monkeypatch):
    ordered = sorted(
        TRAJECTORIES, key=lambda t: len(t.tokens)
    )  # halves of this order would put all long ones into one minibatch
    critic, state = make_critic(model(), dataclasses.replace(CONFIG, minibatches=2), OBJECTIVE)
    sizes, step = [], critic.accumulator.step

    def counted(params, opt_state, frozen, batches, total):
        sizes.append(sum(int((batch.segment_ids > 0).sum()) for batch in batches))
        return step(params, opt_state, frozen, batches, total)

    monkeypatch.setattr(critic.accumulator, "step", counted)
    critic.update(state, ordered, critic.estimate(state, ordered))
    lengths = [len(t.tokens) for t in ordered]
    assert len(sizes) == 2 and sum(sizes) == sum(lengths)
    assert abs(sizes[0] - sizes[1]) <= max(lengths) < sum(lengths[4:]) - sum(lengths[:4])


def test_a_mesh_gives_the_same_estimate_and_step_as_one_device():
    found = []
    for mesh in (None, make_mesh(2, 2, 2)):
        critic = model()
        if mesh is not None:
            nnx.update(critic, shard(nnx.state(critic), mesh))
        learner, state = make_critic(critic, CONFIG, OBJECTIVE, mesh)
        estimate = learner.estimate(state, TRAJECTORIES, PENALTIES)
        (params, _), metrics = learner.update(state, TRAJECTORIES, estimate)
        found.append(
            (params, metrics, [a * (t.roles == POLICY) for a, t in zip(estimate.advantages, TRAJECTORIES)])
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *found)


def test_whitened_advantages_have_mean_0_and_std_1_and_report_the_std_before():
    critic, state = make_critic(model(), CONFIG, dataclasses.replace(OBJECTIVE, whiten=True))
    white = critic.estimate(state, TRAJECTORIES)
    critic.objective = OBJECTIVE
    plain = critic.estimate(state, TRAJECTORIES)
    (mean, deviation), (_, spread) = (
        (statistics.mean(every), statistics.pstdev(every))
        for found in (white, plain)
        for every in [[float(a[s]) for a, own in zip(found.advantages, OWN, strict=True) for s in own]]
    )
    np.testing.assert_allclose([mean, deviation], [0, 1], atol=1e-4)
    np.testing.assert_allclose([white.advantage_std, plain.advantage_std], spread, rtol=1e-4)


@pytest.mark.parametrize(
    "wrong", [{"discount": 1.5}, {"gae_lambda": -0.1}, {"clip": -1.0}, {"epochs": 0}], ids=str
)
def test_an_invalid_field_is_named_with_its_value(wrong):
    ((field, value),) = wrong.items()
    with pytest.raises(UserError, match=rf"critic\.{field}={value}"):
        CriticConfig(SGD, **wrong)
