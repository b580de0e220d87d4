"""The shape probe: shapes with fewer rows or chunks are used only if they change no bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.models import cache
from rrl.models.cpu import kernels
from rrl.models.decoder import Decoder
from rrl.models.lora import LoraConfig, add_lora
from rrl.parallel.mesh import make_mesh
from rrl.rollout import decoding
from rrl.rollout.backend import StepShapes
from rrl.rollout.backends import find_shapes
from rrl.rollout.config import EngineConfig
from rrl.rollout.cpu import shape_probe, workers
from rrl.rollout.cpu.probe_programs import _with_random_adapters, first_layers
from rrl.rollout.engine import Engine
from rrl.rollout.protocol import SingleTurn
from tests.rollout.world import make_world

KEY = jax.random.key(3)
CONFIG = EngineConfig(rows=32, context=192, wake_threshold=8, prefill_tokens=128, workers=1, top_p=0.95)

LARGEST = StepShapes((32,), (), (4,), 0)
"""The shapes of CONFIG without a probe."""


@pytest.fixture(scope="module")
def world():
    decoder, tokenizer, _, requests = make_world()
    lengths = [dataclasses.replace(request, turn_tokens=4 + 2 * request.seed) for request in requests]
    return decoder, tokenizer, lengths


@pytest.mark.slow
@pytest.mark.parametrize(("oversubscribed_slots", "compiled"), [(0, True), (8, True), (8, False)])
def test_steps_of_fewer_rows_change_no_bits(world, oversubscribed_slots, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(kernels, "can_attend", lambda *_: False)
    decoder, tokenizer, requests = world
    config = dataclasses.replace(CONFIG, oversubscribed_slots=oversubscribed_slots)
    narrowed, wide = (Engine(decoder, tokenizer, config) for _ in range(2))
    monkeypatch.setattr(
        "rrl.rollout.loop_runner.find_shapes",
        lambda programs, params: (
            programs.shapes if programs is wide.programs else find_shapes(programs, params)
        ),
    )
    params, environment = nnx.state(decoder), SingleTurn(turn_tokens=48)
    results, whole = (engine.run(params, requests, environment, KEY) for engine in (narrowed, wide))
    assert wide.programs.shapes == LARGEST
    if narrowed.programs.shapes == LARGEST:
        pytest.skip("on this processor all smaller shapes change bits")
    assert narrowed.stats.row_steps == wide.stats.row_steps
    for one, other in zip(results, whole, strict=True):
        for name in ("tokens", "logps", "sampled_logps"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "size", "allowed"),
    [
        ("extend", 16, ((32, 8), (32, 16, 8), (4, 2))),
        pytest.param("cache_attention", 16, ((32, 8), (), (4, 2)), marks=pytest.mark.slow),
        pytest.param("prefill", 2, ((32, 16, 8), (32, 16, 8), (4,)), marks=pytest.mark.slow),
    ],
)
def test_shapes_that_change_bits_are_not_used(world, monkeypatch, function, size, allowed):
    monkeypatch.setattr(kernels, "can_attend", lambda *_: False)
    decoder, tokenizer, _ = world
    owner = cache if function == "cache_attention" else Decoder
    original = getattr(owner, function)

    def wrong_at_size(model, tokens, **others):
        return original(model, tokens * (len(tokens) != size), **others)

    def wrong_attention(q, *others, **named):
        groups = others[4]
        return original(q, *others, **named) * (1 + 1e-5 * (size in groups.batch_sizes))

    monkeypatch.setattr(owner, function, wrong_attention if function == "cache_attention" else wrong_at_size)
    engine = Engine(decoder, tokenizer, CONFIG)
    *shapes, _ = find_shapes(engine.programs, nnx.state(decoder))
    for used, most in zip(shapes, allowed, strict=True):  # other shapes may change bits on this processor
        assert set(used) <= set(most)
    assert shapes[0][0] == 32 and shapes[2][0] == 4


@pytest.mark.slow
def test_a_difference_in_few_last_bits_is_detected(world, monkeypatch):
    decoder, tokenizer, _ = world
    sample_tokens, wrong = decoding.sample_tokens, 0

    def wrong_at_width(*arguments):
        (drawn,) = sample_tokens(*arguments)
        few = (len(drawn.ids) == wrong) & (drawn.ids % 25 == 0)
        return [drawn._replace(logps=jnp.where(few, jnp.nextafter(drawn.logps, -jnp.inf), drawn.logps))]

    def widths():
        engine = Engine(decoder, tokenizer, CONFIG)
        return find_shapes(engine.programs, nnx.state(decoder)).widths

    monkeypatch.setattr(decoding, "sample_tokens", wrong_at_width)
    *_, narrowest = correct = widths()
    if narrowest == 32:
        pytest.skip("on this processor all smaller shapes change bits")
    wrong = narrowest
    assert widths() == correct[:-1]


def shapes_of_steps(monkeypatch):
    """Return a set that records (rows, tokens, layers) of all decode steps that are compiled from now on."""
    shapes, extend = set(), Decoder.extend

    def recorded(model, tokens, **others):
        shapes.add((*tokens.shape, len(others["cache"].k)))
        return extend(model, tokens, **others)

    monkeypatch.setattr(Decoder, "extend", recorded)
    return shapes


def test_if_the_weights_dominate_only_drafts_are_probed(world, monkeypatch):
    decoder, tokenizer, _ = world
    shapes = shapes_of_steps(monkeypatch)
    monkeypatch.setattr(workers, "CPU_CACHE_BYTES", 0)
    for draft_tokens, probed in ((0, set()), (1, {(32, 2, 2)})):
        config = dataclasses.replace(CONFIG, workers=0, draft_tokens=draft_tokens)
        programs = Engine(decoder, tokenizer, config).programs
        found = find_shapes(programs, nnx.state(decoder))
        assert programs.workers == 1 and shapes == probed
        assert found == LARGEST._replace(step_tokens=64 * draft_tokens)


def test_the_probe_runs_the_first_layers_only(world, monkeypatch):
    deep = Decoder(dataclasses.replace(world[0].config, layers=6), rngs=nnx.Rngs(0))
    shapes = shapes_of_steps(monkeypatch)
    programs = Engine(deep, world[1], dataclasses.replace(CONFIG, rows=16)).programs
    find_shapes(programs, nnx.state(deep))
    assert shapes == {(16, 1, 4), (8, 1, 4)} and programs.decoder_config.layers == deep.config.layers == 6


def test_the_probe_uses_kernels_only_if_the_whole_model_does(world):
    """Here only the layers after the probed ones have a sliding window, which the kernels do not compute."""
    windows = {"sliding_window": 64, "sliding_layers": (False,) * 4 + (True,)}
    deep = Decoder(dataclasses.replace(world[0].config, layers=5, **windows), rngs=nnx.Rngs(0))
    programs, _ = first_layers(Engine(deep, world[1], CONFIG).programs, nnx.state(deep))
    assert programs.decoder_config.layers == 4 and not programs.decoder_config.windows
    assert jax.eval_shape(lambda: programs.cache(64, jnp.float32)).kernels is None


def test_after_the_time_limit_only_the_full_width_and_drafts_are_used(world, monkeypatch, caplog):
    decoder, tokenizer, _ = world
    stored = []
    monkeypatch.setattr(shape_probe, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(shape_probe, "store", lambda key, result: stored.append(result))
    shapes = shapes_of_steps(monkeypatch)
    programs = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, draft_tokens=1)).programs
    with caplog.at_level("INFO", "rrl.rollout.cpu.shape_probe"):
        found = find_shapes(programs, nnx.state(decoder))
    assert found.widths == (32,) and found.step_tokens == 64 and shapes == {(32, 2, 2)}
    assert not stored and "the shape probe stopped after 0 s" in caplog.text


def test_few_rows_or_several_devices_have_one_width(world):
    decoder, tokenizer, _ = world
    few = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, rows=15))
    many = Engine(decoder, tokenizer, CONFIG, mesh=make_mesh(2, devices=jax.devices()[:2]))
    for engine, rows in ((few, 15), (many, 32)):
        assert find_shapes(engine.programs, nnx.state(decoder)).widths == (rows,)


def test_the_probe_replaces_zero_adapters_by_random_ones(world):
    decoder = nnx.clone(world[0])
    add_lora(decoder, LoraConfig(rank=2), rngs=nnx.Rngs(0))
    adapted = dict(nnx.to_flat_state(_with_random_adapters(nnx.state(decoder))))
    for path, leaf in nnx.to_flat_state(nnx.state(decoder)):
        if path[-1].endswith("_lora_b"):
            assert not leaf[...].any() and adapted[path][...].all()
        else:
            np.testing.assert_array_equal(leaf[...], adapted[path][...])


def test_compiler_options_that_xla_does_not_know_are_omitted(monkeypatch):
    monkeypatch.setattr(
        workers, "COMPILER_OPTIONS", {"xla_cpu_no_such_option": False, **workers.COMPILER_OPTIONS}
    )
    workers.compiler_options.cache_clear()
    one, two = workers.compiler_options(1), workers.compiler_options(2)
    workers.compiler_options.cache_clear()
    assert (
        set(one)
        <= set(two)
        <= {*workers.COMPILER_OPTIONS, "xla_cpu_multi_thread_eigen"} - {"xla_cpu_no_such_option"}
    )
