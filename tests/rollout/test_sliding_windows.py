"""Rollouts of a model with sliding windows equal its training forward pass, with shared prefixes and oversubscribed slots."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.data.trajectory import POLICY
from rrl.models import cache
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.rl.logprobs import token_logprobs
from rrl.rl.packing import pack
from rrl.rollout import programs
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.protocol import Append, Finish, SearchFor, Stream
from tests.rollout.world import make_world

KEY = jax.random.key(3)
CONFIG = EngineConfig(
    rows=4,
    oversubscribed_slots=2,
    context=192,
    wake_threshold=2,
    prefill_tokens=48,
    max_wait_steps=8,
    top_k=2,
)
GEMMA3 = DecoderConfig(
    vocab_size=416, hidden=32, layers=3, heads=4, kv_heads=2, head_dim=16, mlp=64, model_type="gemma3_text",
    rope_theta=1e6, local_rope_theta=1e4, query_pre_attn_scalar=16, sliding_window=20,
    sliding_layers=(True, False, True), max_positions=512,
)  # fmt: skip
"""The window is shorter than a prompt."""


class Scripted(Stream):
    """Searches once, then continues once."""

    def step(self, episode, text, stop):
        if episode.turn == 2:
            return Finish("done")
        return SearchFor(episode.question.text) if episode.turn == 0 else Append(prefix=" again ")


SCRIPTED = Scripted(turn_tokens=12, observation_tokens=60)


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Blocks of 8 slots and parts of 16 tokens: the cache of a sliding layer holds 40 positions, less than half of a text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "BLOCK", 8)
        patch.setattr(programs, "BLOCK", 8)
        patch.setattr(cache, "WRITE_TOKENS", 16)
        yield


@pytest.fixture(scope="module")
def world():
    _, tokenizer, retriever, requests = make_world()
    groups = [
        dataclasses.replace(request, seed=4 * group + sample, group=group)
        for group, request in enumerate(requests[:3])
        for sample in range(4)
    ]
    return Decoder(GEMMA3, rngs=nnx.Rngs(1)), tokenizer, retriever, groups


def run(world, config=CONFIG, mesh=None, **kwargs):
    decoder, tokenizer, retriever, requests = world
    engine = Engine(decoder, tokenizer, config, retriever=retriever, mesh=mesh)
    params = shard(nnx.state(decoder), mesh) if mesh else nnx.state(decoder)
    return engine.run(params, requests, SCRIPTED, KEY, **kwargs)


@pytest.fixture(scope="module")
def trajectories(world):
    return run(world)


def test_log_probabilities_of_the_rollout_equal_those_of_training(world, trajectories):
    assert all(len(t.searches) == 1 and t.ended == "done" for t in trajectories)
    assert max(len(t.tokens) for t in trajectories) > 2 * 40
    packed = pack([t.tokens for t in trajectories], [t.roles == POLICY for t in trajectories], 192)
    batch = jax.tree.map(jnp.asarray, packed.batch)
    scores = np.asarray(jax.jit(lambda b: token_logprobs(world[0], b).logp)(batch))
    lengths = [len(t.tokens) for t in trajectories]
    for logps, t in zip(packed.unpack(scores, lengths), trajectories, strict=True):
        np.testing.assert_allclose(logps, t.logps, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "how", "tolerance"),
    [
        ({}, {"reference": True}, 0.0),
        ({"share_prompts": False}, {}, 1e-5),
        ({"oversubscribed_slots": 0, "rows": 3, "prefill_tokens": 17, "draft_tokens": 2}, {}, 1e-5),
        ({"oversubscribed_slots": 0}, {"mesh": (2, 1, 2)}, 1e-5),
    ],
)
def test_shared_prefixes_slots_chunks_drafts_and_devices_do_not_change_a_trajectory(
    world, trajectories, change, how, tolerance
):
    if "mesh" in how:
        how = {"mesh": make_mesh(*how["mesh"], devices=jax.devices()[:4])}
    others = run(world, dataclasses.replace(CONFIG, **change), **how)
    for one, other in zip(trajectories, others, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logps, other.logps, rtol=0, atol=tolerance)
