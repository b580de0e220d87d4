"""Rollouts whose sliding layers hold only their last positions equal rollouts with a cache of all positions."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from rrl.data.trajectory import POLICY
from rrl.models import cache
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.rollout import programs
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.protocol import Append, Finish, Restart, Stream
from tests.rollout.world import make_world

KEY = jax.random.key(3)
CONFIG = EngineConfig(rows=4, context=160, wake_threshold=2, prefill_tokens=32, max_wait_steps=4)
TURN = 12
GEMMA3 = DecoderConfig(
    vocab_size=416, hidden=32, layers=3, heads=4, kv_heads=2, head_dim=16, mlp=64, model_type="gemma3_text",
    rope_theta=1e6, local_rope_theta=1e4, query_pre_attn_scalar=16, sliding_window=TURN,
    sliding_layers=(True, False, True), max_positions=512,
)  # fmt: skip
OTHERS = {"rope_theta": 1e6, "local_rope_theta": None, "query_pre_attn_scalar": None}
FAMILIES = {
    "gemma3": GEMMA3,
    "qwen2": dataclasses.replace(GEMMA3, model_type="qwen2", **OTHERS),
    "qwen3": dataclasses.replace(GEMMA3, model_type="qwen3", sliding_layers=(True,) * 3, **OTHERS),
}


class Scripted(Stream):
    """Continues twice after an observation, then once in a new context."""

    def step(self, episode, text, stop):
        if episode.turn == 3:
            return Finish("done")
        observation = f" what was read: {text[:3]}" + 4 * " and so on"
        if episode.turn == 1:
            return Restart(episode.question.text + observation)
        return Append(prefix=observation)


SCRIPTED = Scripted(turn_tokens=TURN, observation_tokens=40)


@pytest.fixture(scope="module")
def world():
    _, tokenizer, _, requests = make_world()
    groups = [
        dataclasses.replace(request, seed=3 * group + sample, group=group, temperature=0.6 * sample)
        for group, request in enumerate(requests[:3])
        for sample in range(3)
    ]
    return tokenizer, groups


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 8 slots and parts of 16 tokens: a window of 12 tokens needs 27 slots, and has 4 blocks."""
    monkeypatch.setattr(cache, "BLOCK", 8)
    monkeypatch.setattr(programs, "BLOCK", 8)
    monkeypatch.setattr(cache, "WRITE_TOKENS", 16)


def run(world, model, change=None, mesh=None, reference=False):
    """Returns the trajectories, the number of prefilled tokens, and the bytes of the cache."""
    tokenizer, requests = world
    decoder = Decoder(model, rngs=nnx.Rngs(1))
    mesh = mesh and make_mesh(*mesh, devices=jax.devices()[:4])
    with Engine(decoder, tokenizer, dataclasses.replace(CONFIG, **(change or {})), mesh=mesh) as engine:
        params = shard(nnx.state(decoder), mesh) if mesh else nnx.state(decoder)
        results = engine.run(params, requests, SCRIPTED, KEY, reference=reference)
        shapes = jax.eval_shape(lambda: engine.programs.cache(CONFIG.context, decoder.dtype))
        return results, engine.stats.prefilled_tokens, shapes.k.size


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logps, other.logps, rtol=0, atol=1e-5)


CASES = {
    "slots": ({"oversubscribed_slots": 2}, {}),
    "drafts": ({"rows": 3, "draft_tokens": 2}, {}),
    "reference loop": ({}, {"reference": True}),
    "mesh": ({"prefill_tokens": 64}, {"mesh": (2, 1, 2)}),
}


def cases():
    """Every family with windows shorter than, equal to and longer than a turn; the other cases with Gemma 3."""
    yield from ((family, window, "slots") for family in FAMILIES for window in (5, TURN, 40))
    yield from (("gemma3", TURN, case) for case in CASES if case != "slots")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "window", "case"), cases())
def test_a_rollout_equals_one_whose_cache_holds_all_positions(
    world, small_blocks, monkeypatch, family, window, case
):
    model, (change, how) = dataclasses.replace(FAMILIES[family], sliding_window=window), CASES[case]
    found, prefilled, size = run(world, model, change, **how)
    monkeypatch.setattr(cache, "WRITE_TOKENS", 10**6)
    whole, shared, whole_size = run(world, model, change, **how)
    assert_same(found, whole)
    assert max(len(t.tokens[c]) for t in found for c in t.contexts) > 80  # several times a ring
    every, ring = CONFIG.context // 8, -(-(window + 15) // 8)
    sliding = sum(model.sliding_layers)
    assert size / whole_size == (sliding * ring + (3 - sliding) * every) / (3 * every)
    unshared = sum(int((t.roles != POLICY).sum()) - len(t.contexts) for t in found)
    assert shared <= prefilled < unshared
