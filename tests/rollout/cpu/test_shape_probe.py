"""Fewer rows a decode step, fewer that read on, fewer pieces to prefill: the same bits, or none are taken."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.models import cache
from rrl.models.decoder import Decoder
from rrl.models.lora import LoraConfig, add_lora
from rrl.parallel.mesh import make_mesh
from rrl.rollout import device, loop
from rrl.rollout.config import EngineConfig
from rrl.rollout.cpu import shape_probe as sizes
from rrl.rollout.cpu import workers
from rrl.rollout.cpu.shape_probe import _adapted, configure_shapes
from rrl.rollout.engine import Engine
from rrl.rollout.protocol import SingleTurn
from tests.rollout.world import make_world

KEY = jax.random.key(3)
CONFIG = EngineConfig(rows=32, context=192, wake_threshold=8, prefill_tokens=128, workers=1, top_p=0.95)


@pytest.fixture(scope="module")
def world():
    decoder, tokenizer, _, requests = make_world()
    lengths = [dataclasses.replace(request, turn_tokens=4 + 2 * request.seed) for request in requests]
    return decoder, tokenizer, lengths


@pytest.mark.slow
@pytest.mark.parametrize(("oversubscribed_slots", "compiled"), [(0, True), (8, True), (8, False)])
def test_a_row_has_the_same_bits_among_few_as_among_all(world, oversubscribed_slots, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(loop, "can_attend", lambda *_: False)
    decoder, tokenizer, requests = world
    config = dataclasses.replace(CONFIG, oversubscribed_slots=oversubscribed_slots)
    narrowed, wide = (Engine(decoder, tokenizer, config) for _ in range(2))
    monkeypatch.setattr(
        "rrl.rollout.engine.configure_shapes",
        lambda programs, params: None if programs is wide.programs else configure_shapes(programs, params),
    )
    params, environment = nnx.state(decoder), SingleTurn(turn_tokens=48)
    found, whole = (engine.run(params, requests, environment, KEY) for engine in (narrowed, wide))
    assert (wide.programs.widths, wide.programs.readers, wide.programs.prefill_chunks) == ((32,), (), (4,))
    found_sizes = narrowed.programs.widths, narrowed.programs.readers, narrowed.programs.prefill_chunks
    if found_sizes == ((32,), (), (4,)):
        pytest.skip("on this processor no smaller sizes have the same bits")
    assert narrowed.stats.row_steps == wide.stats.row_steps
    for one, other in zip(found, whole, strict=True):
        for name in ("tokens", "logps", "sampled_logps"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize(
    ("place", "size", "kept"),
    [
        ("extend", 16, ((32, 8), (32, 16, 8), (4, 2))),
        pytest.param("cache_attention", 16, ((32, 8), (), (4, 2)), marks=pytest.mark.slow),
        pytest.param("prefill", 2, ((32, 16, 8), (32, 16, 8), (4,)), marks=pytest.mark.slow),
    ],
)
def test_sizes_on_which_bits_depend_are_not_taken(world, monkeypatch, place, size, kept):
    monkeypatch.setattr(loop, "can_attend", lambda *_: False)
    decoder, tokenizer, _ = world
    owner = cache if place == "cache_attention" else Decoder
    right = getattr(owner, place)

    def depends(model, tokens, **others):
        return right(model, tokens * (len(tokens) != size), **others)

    def attention(q, *others, **named):
        readers = others[6]
        return right(q, *others, **named) * (1 + 1e-5 * (size in readers))

    monkeypatch.setattr(owner, place, attention if place == "cache_attention" else depends)
    engine = Engine(decoder, tokenizer, CONFIG)
    configure_shapes(engine.programs, nnx.state(decoder))
    found = engine.programs.widths, engine.programs.readers, engine.programs.prefill_chunks
    for some, most in zip(found, kept, strict=True):  # a processor may leave out others of its own
        assert set(some) <= set(most)
    assert found[0][0] == 32 and found[2][0] == 4


@pytest.mark.slow
def test_a_last_bit_that_seldom_differs_is_seen(world, monkeypatch):
    decoder, tokenizer, _ = world
    draw, wrong = device.sample_tokens, 0

    def off(*given):
        (drawn,) = draw(*given)
        seldom = (len(drawn.ids) == wrong) & (drawn.ids % 25 == 0)
        return [drawn._replace(logps=jnp.where(seldom, jnp.nextafter(drawn.logps, -jnp.inf), drawn.logps))]

    def widths():
        engine = Engine(decoder, tokenizer, CONFIG)
        configure_shapes(engine.programs, nnx.state(decoder))
        return engine.programs.widths

    monkeypatch.setattr(device, "sample_tokens", off)
    *_, narrowest = right = widths()
    if narrowest == 32:
        pytest.skip("on this processor no smaller sizes have the same bits")
    wrong = narrowest
    assert widths() == right[:-1]


def shapes_of_steps(monkeypatch):
    """The shapes of the tokens, and how many layers there are, of all steps that are compiled from here on."""
    shapes, extend = set(), Decoder.extend

    def seen(model, tokens, **others):
        shapes.add((*tokens.shape, len(others["cache"].k)))
        return extend(model, tokens, **others)

    monkeypatch.setattr(Decoder, "extend", seen)
    return shapes


def test_where_the_weights_dominate_only_guesses_are_tried(world, monkeypatch):
    decoder, tokenizer, _ = world
    shapes = shapes_of_steps(monkeypatch)
    monkeypatch.setattr(workers, "CPU_CACHE_BYTES", 0)
    for draft_tokens, tried in ((0, set()), (1, {(32, 2, 2)})):
        config = dataclasses.replace(CONFIG, workers=0, draft_tokens=draft_tokens)
        programs = Engine(decoder, tokenizer, config).programs
        configure_shapes(programs, nnx.state(decoder))
        assert programs.workers == 1 and shapes == tried
        found = programs.widths, programs.readers, programs.prefill_chunks, programs.step_tokens
        assert found == ((32,), (), (4,), 64 * draft_tokens)


def test_sizes_are_tried_over_the_first_layers(world, monkeypatch):
    deep = Decoder(dataclasses.replace(world[0].config, layers=6), rngs=nnx.Rngs(0))
    shapes = shapes_of_steps(monkeypatch)
    programs = Engine(deep, world[1], dataclasses.replace(CONFIG, rows=16)).programs
    configure_shapes(programs, nnx.state(deep))
    assert shapes == {(16, 1, 4), (8, 1, 4)} and programs.decoder_config.layers == deep.config.layers == 6


def test_once_the_time_is_up_the_full_width_is_left_and_guesses_are_still_tried(world, monkeypatch, caplog):
    decoder, tokenizer, _ = world
    kept = []
    monkeypatch.setattr(sizes, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(sizes, "store", lambda key, found: kept.append(found))
    shapes = shapes_of_steps(monkeypatch)
    programs = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, draft_tokens=1)).programs
    with caplog.at_level("INFO", "rrl.rollout.cpu.shape_probe"):
        configure_shapes(programs, nnx.state(decoder))
    assert programs.widths == (32,) and programs.step_tokens == 64 and shapes == {(32, 2, 2)}
    assert not kept and "after 0 s no further row counts were tried" in caplog.text


def test_few_rows_and_several_devices_have_one_width(world):
    decoder, tokenizer, _ = world
    few = Engine(decoder, tokenizer, dataclasses.replace(CONFIG, rows=15))
    many = Engine(decoder, tokenizer, CONFIG, mesh=make_mesh(2, devices=jax.devices()[:2]))
    for engine, rows in ((few, 15), (many, 32)):
        configure_shapes(engine.programs, nnx.state(decoder))
        assert engine.programs.widths == (rows,)


def test_adapters_that_are_zero_are_tried_as_if_they_were_not(world):
    decoder = nnx.clone(world[0])
    add_lora(decoder, LoraConfig(rank=2), rngs=nnx.Rngs(0))
    adapted = dict(nnx.to_flat_state(_adapted(nnx.state(decoder))))
    for path, leaf in nnx.to_flat_state(nnx.state(decoder)):
        if path[-1].endswith("_lora_b"):
            assert not leaf[...].any() and adapted[path][...].all()
        else:
            np.testing.assert_array_equal(leaf[...], adapted[path][...])


def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch):
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
