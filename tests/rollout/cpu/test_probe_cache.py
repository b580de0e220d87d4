"""What was found about sizes is remembered for these programs on this machine, and for no others."""

import dataclasses
import logging

import jax.numpy as jnp
import pytest
from flax import nnx

from rrl.models.decoder import Decoder
from rrl.models.lora import LoraConfig, add_lora
from rrl.rollout import loop
from rrl.rollout.config import EngineConfig
from rrl.rollout.cpu import probe_cache as remembered
from rrl.rollout.cpu import shape_probe as sizes
from rrl.rollout.cpu.probe_cache import cache_key, load, store
from rrl.rollout.cpu.shape_probe import ProbeResult, _validated, probe_shapes
from rrl.rollout.engine import Engine
from tests.rollout.world import make_world

CONFIG = EngineConfig(rows=32, context=192, wake_threshold=8, prefill_tokens=128, workers=1, draft_tokens=1)
FOUND = {"widths": [32, 8], "readers": [], "together": [4], "step_tokens": 64}
KEY = "0" * 32


@pytest.fixture(scope="module")
def world():
    return make_world()[:2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where things are remembered in this test."""
    monkeypatch.setattr(remembered, "cache_folder", lambda: tmp_path)
    return tmp_path / "sizes"


def key(world, decoder=None, config=CONFIG):
    decoder = decoder or world[0]
    return cache_key(Engine(decoder, world[1], config).programs, nnx.state(decoder))


def test_what_is_remembered_is_recalled_and_overwritten(folder):
    assert load(KEY) is None
    for found in ({"widths": [1]}, FOUND):
        store(KEY, found)
        assert load(KEY) == found
    assert [file.name for file in folder.iterdir()] == [f"{KEY}.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b"3", b"[" * 100_000])
def test_a_file_that_cannot_be_read_is_as_good_as_none(folder, content):
    folder.mkdir()
    (folder / f"{KEY}.json").write_bytes(content)
    assert load(KEY) is None
    store(KEY, FOUND)
    assert load(KEY) == FOUND


def test_a_folder_that_cannot_be_written_does_no_harm(folder, caplog):
    caplog.set_level(logging.WARNING)
    folder.write_text("a file")
    store(KEY, FOUND)
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
def test_other_sizes_of_an_engine_are_tried_for_themselves(world, more):
    assert key(world) != key(world, config=dataclasses.replace(CONFIG, **more))


def test_limits_in_seconds_do_not_matter(world):
    assert key(world) == key(world, config=dataclasses.replace(CONFIG, search_seconds=5.0, stall_seconds=0.0))


def test_other_models_are_tried_for_themselves(world):
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


def test_other_machines_and_libraries_try_for_themselves(world, monkeypatch):
    keys = [key(world)]

    def also():
        remembered._code.cache_clear()
        keys.append(key(world))
        monkeypatch.undo()
        remembered._code.cache_clear()

    monkeypatch.setattr(remembered, "processor", lambda: "another")
    also()
    monkeypatch.setattr(remembered, "available_cores", lambda: 3)
    also()
    monkeypatch.setattr(loop, "can_attend", lambda *_: False)
    also()
    monkeypatch.setattr(remembered.importlib.metadata, "version", lambda name: "9.9")
    also()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    also()
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
        {"readers": [5]},
        {"readers": None},
        {"together": []},
        {"together": [2]},
        {"step_tokens": 32},
        {"step_tokens": []},
        {"more": 1},
    ],
)
def test_what_cannot_have_been_found_is_not_believed(changed):
    known = [32, 16, 8], [4], 64
    assert _validated(FOUND, *known) == ProbeResult((32, 8), (), (4,), 64)
    assert _validated(FOUND | {"step_tokens": 0}, *known) == ProbeResult((32, 8), (), (4,), 0)
    assert _validated(FOUND | changed, *known) is None and _validated(None, *known) is None


def test_a_second_engine_tries_nothing(world, folder, monkeypatch):
    decoder, tokenizer = world
    monkeypatch.setattr(sizes, "load", load)
    monkeypatch.setattr(sizes, "store", store)
    trials = [ProbeResult((32, 16), (), (4,), 64), ProbeResult((32,), (), (4,), 0)]
    monkeypatch.setattr(sizes, "_probe", lambda *_: trials.pop(0))

    def found():
        return probe_shapes(Engine(decoder, tokenizer, CONFIG).programs, nnx.state(decoder))

    assert found() == found() == ProbeResult((32, 16), (), (4,), 64)
    (file,) = folder.iterdir()
    file.write_text('{"widths": [32, 31]}')
    assert found() == found() == ProbeResult((32,), (), (4,), 0)
