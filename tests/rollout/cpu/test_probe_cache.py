"""The cache of the shape probe: a stored result is used for the same programs on the same machine only."""

import dataclasses
import logging

import jax.numpy as jnp
import pytest
from flax import nnx

from rrl.models.cpu import kernels
from rrl.models.decoder import Decoder
from rrl.models.lora import LoraConfig, add_lora
from rrl.rollout.backend import StepShapes
from rrl.rollout.config import EngineConfig
from rrl.rollout.cpu import probe_cache, shape_probe
from rrl.rollout.cpu.probe_cache import cache_key, load, store
from rrl.rollout.cpu.shape_probe import _validated, probe_shapes
from rrl.rollout.engine import Engine
from tests.rollout.world import make_world

CONFIG = EngineConfig(rows=32, context=192, wake_threshold=8, prefill_tokens=128, workers=1, draft_tokens=1)
STORED = {"widths": [32, 8], "attention_batches": [], "chunk_counts": [4], "step_tokens": 64}
KEY = "0" * 32


@pytest.fixture(scope="module")
def world():
    return make_world()[:2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache's folder in this test."""
    monkeypatch.setattr(probe_cache, "cache_folder", lambda: tmp_path)
    return tmp_path / "shape_probe"


def key(world, decoder=None, config=CONFIG):
    decoder = decoder or world[0]
    return cache_key(Engine(decoder, world[1], config).programs, nnx.state(decoder))


def test_a_stored_result_is_loaded_and_can_be_overwritten(folder):
    assert load(KEY) is None
    for result in ({"widths": [1]}, STORED):
        store(KEY, result)
        assert load(KEY) == result
    assert [file.name for file in folder.iterdir()] == [f"{KEY}.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b"3", b"[" * 100_000])
def test_an_unreadable_file_is_ignored_and_overwritten(folder, content):
    folder.mkdir()
    (folder / f"{KEY}.json").write_bytes(content)
    assert load(KEY) is None
    store(KEY, STORED)
    assert load(KEY) == STORED


def test_an_unwritable_folder_is_ignored(folder, caplog):
    caplog.set_level(logging.WARNING)
    folder.write_text("a file")
    store(KEY, STORED)
    assert load(KEY) is None and not caplog.records


@pytest.mark.parametrize(
    "more",
    [
        {"rows": 64},
        {"oversubscribed_slots": 8},
        {"context": 256},
        {"draft_tokens": 2},
        {"prefill_tokens": 64},
        {"workers": 2, "rows": 64},
        {"top_p": 0.9},
        {"sample_top_k": 5},
    ],
)
def test_other_sizes_of_an_engine_have_another_key(world, more):
    assert key(world) != key(world, config=dataclasses.replace(CONFIG, **more))


def test_time_limits_do_not_change_the_key(world):
    assert key(world) == key(world, config=dataclasses.replace(CONFIG, search_seconds=5.0, stall_seconds=0.0))


def test_other_model_shapes_have_another_key_and_other_values_have_not(world):
    shape, rngs = world[0].config, nnx.Rngs(0)
    adapted = Decoder(shape, rngs=rngs)
    add_lora(adapted, LoraConfig(rank=2), rngs=rngs)
    models = [
        Decoder(dataclasses.replace(shape, layers=3), rngs=rngs),
        Decoder(dataclasses.replace(shape, mlp=80), rngs=rngs),
        Decoder(shape, rngs=rngs, dtype=jnp.bfloat16),
        Decoder(shape, rngs=rngs, param_dtype=jnp.bfloat16),
        adapted,
    ]
    keys = {key(world), *(key(world, model) for model in models)}
    assert len(keys) == 1 + len(models)
    assert key(world, Decoder(shape, rngs=rngs)) == key(world)


def test_other_machines_and_libraries_have_another_key(world, monkeypatch):
    keys = [key(world)]

    def add_key():
        probe_cache._code.cache_clear()
        keys.append(key(world))
        monkeypatch.undo()
        probe_cache._code.cache_clear()

    monkeypatch.setattr(probe_cache, "processor", lambda: "another")
    add_key()
    monkeypatch.setattr(probe_cache, "available_cores", lambda: 3)
    add_key()
    monkeypatch.setattr(kernels, "can_attend", lambda *_: False)
    add_key()
    monkeypatch.setattr(probe_cache.importlib.metadata, "version", lambda name: "9.9")
    add_key()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    add_key()
    assert len(set(keys)) == len(keys) and key(world) == keys[0]


@pytest.mark.parametrize(
    "changed",
    [
        {"widths": [32, 12]},
        {"widths": [16, 8]},
        {"widths": [8, 32]},
        {"widths": [32, 32]},
        {"widths": []},
        {"widths": 32},
        {"widths": [32, "8"]},
        {"attention_batches": [5]},
        {"attention_batches": None},
        {"chunk_counts": []},
        {"chunk_counts": [2]},
        {"step_tokens": 32},
        {"step_tokens": []},
        {"more": 1},
    ],
)
def test_an_impossible_stored_result_is_ignored(changed):
    candidates = [32, 16, 8], [4], 64
    assert _validated(STORED, *candidates) == StepShapes((32, 8), (), (4,), 64)
    assert _validated(STORED | {"step_tokens": 0}, *candidates) == StepShapes((32, 8), (), (4,), 0)
    assert _validated(STORED | changed, *candidates) is None and _validated(None, *candidates) is None


def test_a_second_engine_uses_the_stored_result(world, folder, monkeypatch):
    decoder, tokenizer = world
    monkeypatch.setattr(shape_probe, "load", load)
    monkeypatch.setattr(shape_probe, "store", store)
    results = [StepShapes((32, 16), (), (4,), 64), StepShapes((32,), (), (4,), 0)]
    monkeypatch.setattr(shape_probe, "_probe", lambda *_: results.pop(0))

    def probed():
        return probe_shapes(Engine(decoder, tokenizer, CONFIG).programs, nnx.state(decoder))

    assert probed() == probed() == StepShapes((32, 16), (), (4,), 64)
    (file,) = folder.iterdir()
    file.write_text('{"widths": [32, 31]}')
    assert probed() == probed() == StepShapes((32,), (), (4,), 0)
