"""The engine: the jitted loop agrees with the reference loop and with the training forward pass, on one device and on eight."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT
from rrl.miniwiki import generate
from rrl.models.decoder import Decoder
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.retrieval.encoder_folder import load_text_encoder
from rrl.retrieval.index import make_retriever
from rrl.rl.logprobs import token_logprobs
from rrl.rl.packing import pack
from rrl.rollout.engine import Engine, RolloutStats
from rrl.rollout.episodes import Request
from rrl.rollout.protocol import Finish, Restart, SingleTurn
from rrl.rollout.sampling import truncate
from rrl.rollout.scheduler import Scheduler
from tests.rollout.scripted import CONFIG, KEY, SCRIPTED, TEMPERATURES, assert_same


@pytest.fixture(scope="module")
def trajectories(world, engine):
    return engine.run(nnx.state(world[0]), world[3], SCRIPTED, KEY)


def test_paused_slots_wait_fewer_steps_while_a_query_is_embedded(world, monkeypatch):
    decoder, tokenizer, _, requests = world
    passages = generate("train", seed=0, passages=60).passages
    retriever = make_retriever(passages, "exact", load_text_encoder("assets/miniwiki-encoder"))
    config = dataclasses.replace(CONFIG, wake_threshold=8)
    engine, pack_reply, runs = (
        Engine(decoder, tokenizer, config, retriever=retriever),
        Scheduler._pack_reply,
        [],
    )

    def pack_with_full_wait(scheduler, *parts):
        message = pack_reply(scheduler, *parts)
        message[-1] = config.max_wait_steps
        return message

    for change in (pack_reply, pack_with_full_wait):
        monkeypatch.setattr(Scheduler, "_pack_reply", change)
        runs.append(engine.run(nnx.state(decoder), requests, SCRIPTED, KEY))
        runs.append(engine.stats.row_steps)
    early, early_steps, late, late_steps = runs
    assert_same(early, late, 0)
    assert early_steps < late_steps and any(search.titles for t in early for search in t.searches)


def test_trajectories_are_in_the_order_of_the_requests_with_consistent_arrays(world, trajectories):
    assert [t.request for t in trajectories] == list(range(20))
    for trajectory, request in zip(trajectories, world[3], strict=True):
        count = len(trajectory.tokens)
        assert {len(trajectory.roles), len(trajectory.logps), len(trajectory.turns)} == {count}
        prompt = len(request.prompt)
        np.testing.assert_array_equal(trajectory.tokens[:prompt], request.prompt)
        assert (trajectory.roles[:prompt] == PROMPT).all()
        assert (trajectory.roles[prompt:] != PROMPT).all()
        assert ((trajectory.logps < 0) == (trajectory.roles == POLICY)).all()
        assert (np.diff(trajectory.turns) >= 0).all()
        assert count <= CONFIG.context


def test_observations_are_cut_between_their_tags(trajectories):
    observed = [
        text for t in trajectories for role, text in t.segments if role == ENVIRONMENT and "(Title" in text
    ]
    assert observed
    whole = re.compile(
        r"( again |\n<observation>\n[^<]*\n</observation>\n)+"
    )  # several if the policy wrote no text between them
    assert all(whole.fullmatch(text) for text in observed)


def test_the_jitted_loop_is_bitwise_equal_to_the_reference_loop(world, trajectories):
    decoder, tokenizer, retriever, requests = world
    engine = Engine(decoder, tokenizer, CONFIG, retriever=retriever)
    assert_same(
        trajectories, engine.run(nnx.state(decoder), requests, SCRIPTED, KEY, reference=True), tolerance=0
    )


def test_a_trajectory_does_not_depend_on_its_batch_or_slot(world, engine, trajectories):
    params, requests = nnx.state(world[0]), world[3]
    assert_same(
        trajectories[4:15][::-1], engine.run(params, requests[4:15][::-1], SCRIPTED, KEY), tolerance=0
    )
    assert_same([trajectories[17]], engine.run(params, [requests[17]], SCRIPTED, KEY), tolerance=0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"rows": 3, "wake_threshold": 1, "prefill_tokens": 17, "max_wait_steps": 2},
        pytest.param({"rows": 1, "wake_threshold": 1}, marks=pytest.mark.slow),
        pytest.param(
            {"rows": 64, "workers": 2, "oversubscribed_slots": 8, "draft_tokens": 1}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_trajectory_does_not_depend_on_slots_workers_chunks_or_drafts(
    world, trajectories, size_tolerance, sizes
):
    decoder, tokenizer, retriever, requests = world
    engine = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, **sizes), retriever=retriever)
    results = engine.run(nnx.state(decoder), requests[4:15][::-1], SCRIPTED, KEY)
    assert_same(trajectories[4:15][::-1], results, size_tolerance)


@pytest.mark.parametrize("reference", [False, True])
def test_workers_share_the_requests_and_are_bitwise_equal_to_one_worker_of_as_many_rows(
    world, trajectories, reference
):
    decoder, tokenizer, retriever, requests = world
    engine = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, rows=16, workers=2), retriever=retriever)
    params, ended = nnx.state(decoder), []
    results = engine.run(
        params, requests, SCRIPTED, KEY, reference=reference, on_finish=lambda i, t: ended.append(i)
    )
    assert_same(trajectories, results, tolerance=0)
    assert sorted(ended) == list(range(20))
    assert [scheduler.sizes.slots for scheduler in engine.loops.schedulers] == [8, 8] and all(
        scheduler.prefills.prefilled_tokens for scheduler in engine.loops.schedulers
    )
    assert sum(t.policy_tokens for t in results) == engine.stats.policy_tokens <= engine.stats.row_steps


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (4, 1, 2)])
def test_eight_devices_give_the_same_trajectories(world, trajectories, shape):
    decoder, tokenizer, retriever, requests = world
    mesh = make_mesh(*shape)
    engine = Engine(decoder, tokenizer, CONFIG, retriever=retriever, mesh=mesh)
    assert_same(trajectories, engine.run(shard(nnx.state(decoder), mesh), requests, SCRIPTED, KEY))


def test_busy_is_the_share_of_rows_that_write(world, engine):
    start = RolloutStats()
    assert (start.busy, start.tokens_per_second) == (0, 0)
    results = engine.run(nnx.state(world[0]), world[3][4:5], SCRIPTED, KEY)
    one = engine.stats
    assert one.policy_tokens == results[0].policy_tokens and one.row_steps == 8 * one.policy_tokens
    assert one.busy == 1 / 8 and one.tokens_per_second == one.policy_tokens / one.seconds
    engine.run(nnx.state(world[0]), world[3][4:8], SCRIPTED, KEY)
    both = one + engine.stats
    assert 1 / 8 < both.busy < engine.stats.busy <= 4 / 8


def test_rollout_log_probabilities_equal_those_of_training(world, trajectories):
    decoder = world[0]
    packed = pack([t.tokens for t in trajectories], [t.roles == POLICY for t in trajectories], 192)
    batch = jax.tree.map(jnp.asarray, packed.batch)
    scores = np.asarray(jax.jit(lambda b: token_logprobs(decoder, b).logp)(batch))
    for logps, t in zip(
        packed.unpack(scores, [len(t.tokens) for t in trajectories]), trajectories, strict=True
    ):
        np.testing.assert_allclose(logps, t.logps, atol=1e-5)


def test_sampled_log_probabilities_follow_temperature_and_truncation_of_each_request(world, trajectories):
    tokens = np.zeros((20, CONFIG.context), np.int32)
    for row, t in enumerate(trajectories):
        tokens[row, : len(t.tokens)] = t.tokens
    temperatures = np.array([max(TEMPERATURES[t.request % 5], 1e-9) for t in trajectories])

    @jax.jit
    def sampled(tokens, temperatures):
        hidden = world[0](tokens, positions=jnp.broadcast_to(jnp.arange(CONFIG.context), tokens.shape))
        logits = (world[0].unembed(hidden) / temperatures[:, None, None]).reshape(tokens.size, -1)
        logps = jax.nn.log_softmax(truncate(logits, top_p=CONFIG.top_p, top_k=CONFIG.sample_top_k))
        drawn = jnp.roll(tokens, -1, axis=1).reshape(-1, 1)
        return jnp.take_along_axis(logps, drawn, axis=-1).reshape(tokens.shape)

    wanted = np.asarray(sampled(tokens, temperatures))
    for row, t in enumerate(trajectories):
        own = np.flatnonzero(t.roles == POLICY)
        np.testing.assert_allclose(t.sampled_logps[own], wanted[row, own - 1], atol=1e-4)


class TwoContexts(SingleTurn):
    """Repeats the prompt in a second context."""

    def step(self, episode, text, stop):
        return Finish("done") if episode.turn else Restart(np.asarray([5, 6, 7], np.int32))


def test_each_token_of_a_trajectory_has_its_own_random_number(world, engine):
    """With equally likely tokens, the sampled token shows the random number."""
    uniform = jax.tree.map(jnp.zeros_like, nnx.state(world[0]))
    batch = [Request(request.question, np.asarray([5, 6, 7]), request.seed) for request in world[3][:4]]
    results = engine.run(uniform, batch, TwoContexts(turn_tokens=40), KEY)
    drawn = [t.tokens[t.roles == POLICY] for t in results]
    for tokens in drawn:  # 80 draws from 300 tokens give about 70 different tokens
        assert len(tokens) > 60 and len(set(tokens.tolist())) > 0.7 * len(tokens)
    assert len({tokens.tobytes() for tokens in drawn}) == 4


@pytest.mark.parametrize("tied", [False, True])
def test_both_loops_compute_in_float32_with_bfloat16_weights(world, tied):
    config = dataclasses.replace(world[0].config, tie_embeddings=tied)
    decoder = Decoder(config, rngs=nnx.Rngs(1), dtype=jnp.float32, param_dtype=jnp.bfloat16)
    engine = Engine(decoder, world[1], CONFIG)
    given = nnx.state(decoder), world[3][:3], SingleTurn(turn_tokens=8), KEY
    assert_same(engine.run(*given), engine.run(*given, reference=True), tolerance=0)
