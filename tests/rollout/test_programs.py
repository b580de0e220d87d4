"""Compiled programs are freed with their engine: each holds memory maps, of which Linux allows a process about 65,000."""

import weakref

import jax
import numpy as np
import pytest
from flax import nnx

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.models.decoder import Decoder
from rrl.models.tokenizer import train_tokenizer
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.episodes import Request
from rrl.rollout.protocol import SingleTurn
from tests.memory import collect, memory_maps
from tests.tiny import tiny_shape

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def world():
    """(decoder, tokenizer, requests)"""
    tokenizer = train_tokenizer(["A question about a film.", "An answer."], 300)
    decoder = Decoder(tiny_shape(304, 64), rngs=nnx.Rngs(0))
    prompt = np.asarray(tokenizer.encode("A question"), np.int32)
    return decoder, tokenizer, [Request(Question("q", "A question", ("answer",)), prompt, 0)]


def used(world, rows: int, reference: bool = False) -> Engine:
    """Return an engine that has run, and so has compiled its loop."""
    decoder, tokenizer, requests = world
    engine = Engine(decoder, tokenizer, EngineConfig(rows=rows, context=64, workers=1))
    engine.run(nnx.state(decoder), requests, SingleTurn(turn_tokens=4), KEY, reference=reference)
    return engine


@pytest.mark.parametrize("reference", [False, True])
def test_closing_an_engine_frees_its_memory_maps(world, reference):
    used(world, rows=1, reference=reference).close()  # compiles what all engines share
    before = memory_maps()
    engine = used(world, rows=1, reference=reference)
    compiled = memory_maps()
    engine.close()
    assert memory_maps() <= before < compiled


def test_a_with_block_closes_the_engine(world):
    decoder, tokenizer, requests = world
    with Engine(decoder, tokenizer, EngineConfig(rows=1, context=64)) as engine:
        pass
    with pytest.raises(UserError, match="this engine is closed; create another"):
        engine.run(nnx.state(decoder), requests, SingleTurn(turn_tokens=4), KEY)


def test_close_during_a_run_takes_effect_at_its_end(world):
    decoder, tokenizer, requests = world
    engine = Engine(decoder, tokenizer, EngineConfig(rows=1, context=64, workers=1))
    seen = []

    def close(_, trajectory):
        engine.close()
        seen.append(trajectory)

    found = engine.run(nnx.state(decoder), requests, SingleTurn(turn_tokens=4), KEY, on_finish=close)
    assert found == seen and not engine.loops.compiled
    with pytest.raises(UserError, match="this engine is closed"):
        engine.run(nnx.state(decoder), requests, SingleTurn(turn_tokens=4), KEY)


def test_an_unreferenced_engine_is_garbage_collected(world):
    collected = weakref.ref(used(world, rows=1))
    collect()
    assert collected() is None


@pytest.mark.slow
def test_thirty_engines_of_different_sizes_hold_no_more_maps_than_two(world):
    counts = []
    for rows in range(1, 31):
        used(world, rows)
        collect()
        counts.append(memory_maps())
    # One engine has more than a hundred; the last may not be collected yet.
    assert max(counts[2:]) <= counts[1] + 300, counts
