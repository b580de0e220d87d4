"""What the engine compiles, and when."""

import contextlib
import dataclasses

import jax
from flax import nnx

from rrl.rollout.automaton import CACHED_STOP_TABLES
from rrl.rollout.engine import Engine
from rrl.rollout.protocol import SingleTurn
from tests.rollout.scripted import CONFIG, KEY, SCRIPTED


@contextlib.contextmanager
def log_compiles():
    """Log compilations of all threads (jax.log_compiles covers only the calling thread)."""
    jax.config.update("jax_log_compiles", True)
    try:
        yield
    finally:
        jax.config.update("jax_log_compiles", False)


def test_the_loop_of_all_workers_is_compiled_once(world, caplog):
    decoder, tokenizer, retriever, requests = world
    engine = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, workers=2, rows=10), retriever=retriever)
    with log_compiles(), caplog.at_level("WARNING"):
        engine.run(nnx.state(decoder), requests, SCRIPTED, KEY)
    assert sum("Finished XLA compilation of jit(episode_loop)" in line for line in caplog.messages) == 1


def test_a_second_run_compiles_nothing(world, caplog):
    decoder, tokenizer, retriever, requests = world
    engine, params = Engine(decoder, tokenizer, CONFIG, retriever=retriever), nnx.state(decoder)

    def compiled(batch, key):
        caplog.clear()
        with log_compiles():
            engine.run(params, batch, SCRIPTED, key)
        return [line for line in caplog.messages if "Finished XLA compilation" in line]

    with caplog.at_level("INFO", "rrl.rollout.loop_runner"):
        assert compiled([dataclasses.replace(requests[0], stops=("o",)), *requests[1:]], jax.random.key(0))
    assert (
        "compiling 1 rollout workers, each with 8 slots x 192 tokens: decode steps of 8 rows; prefills of 1 chunks x 32 tokens "
        "on each of 1 data shards, turns of 12 tokens, 2 stop strings"
    ) in caplog.messages
    # Fewer and other questions, other temperatures, turn lengths and stop strings: only array values change.
    others = [
        dataclasses.replace(r, seed=r.seed + 50, temperature=0.3, turn_tokens=7) for r in requests[3:14]
    ]
    assert compiled(others, jax.random.key(1)) == []


def test_another_number_of_stop_strings_needs_another_compilation_which_is_logged(world, caplog):
    decoder, tokenizer, _, requests = world
    engine = Engine(decoder, tokenizer, CONFIG)
    with caplog.at_level("INFO", "rrl.rollout.loop_runner"):
        for stops in (("qx",), ("qx", "qy")):  # both have the same first accepting state
            engine.run(
                nnx.state(decoder), [dataclasses.replace(requests[0], stops=stops)], SingleTurn(4), KEY
            )
    assert (
        len([line for line in caplog.messages if line.startswith("compiling")])
        == len(engine.loops.compiled)
        == 2
    )


def test_a_cached_stop_table_serves_subsets_and_the_cache_is_bounded(world):
    engine = Engine(*world[:2], CONFIG)
    both = engine._stop_tables.get([("e",), ("o",), ()])
    assert engine._stop_tables.get([("o",), ("e",)]) is both
    tables = [engine._stop_tables.get([(letter,)]) for letter in "abcdfgh"]
    assert engine._stop_tables.get([()]) is both and all(table is not both for table in tables)
    engine._stop_tables.get([("i",)])
    assert len(engine._stop_tables) == CACHED_STOP_TABLES and engine._stop_tables.get([()]) is not both
