"""The CPU kernels give XLA's results, a token's bits depend only on its row, and compiling is cached and safe."""

import ctypes
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.models.attention import cache_attention
from rrl.models.cache import BLOCK, KVCache
from rrl.models.config import DecoderConfig
from rrl.models.cpu import layers as kernel
from rrl.models.cpu import library as kernel_library
from rrl.models.cpu.kernels import CpuKernels
from rrl.models.cpu.layers import can_attend, can_compute, cpu_attention, cpu_copy, cpu_layers
from rrl.models.cpu.packed import FORMATS
from rrl.models.lora import LoraConfig, add_lora, merge_lora
from rrl.models.rope_scaling import Llama3Scaling
from tests.models.cpu.test_draw import check_equals_sample, sampling_inputs
from tests.models.small import draw, extend, filled, make, places, run

LAYERS, BLOCKS, ROWS = 2, 3, 5
SLOTS = BLOCKS * BLOCK - 7


BASE = DecoderConfig(vocab_size=97, hidden=32, layers=3, heads=4, kv_heads=2, head_dim=16, mlp=48)
SHAPES = {
    "qwen2": BASE,
    "qwen3": dataclasses.replace(BASE, model_type="qwen3", heads=6, hidden=80, tie_embeddings=False, rms_eps=0.1),
    "llama": dataclasses.replace(BASE, model_type="llama", kv_heads=4, head_dim=32, mlp=112, rms_eps=1e-5,
                                 rope_theta=500.0, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
    "one-layer": dataclasses.replace(BASE, layers=1, kv_heads=1),
    "large": dataclasses.replace(BASE, layers=2, hidden=256, mlp=1040),
}  # fmt: skip


def made(entries, time, group, kv_heads, width, seed=0):
    """Random queries, keys and values, and positions; half of the last entry's positions are beyond the last slot."""
    draw = np.random.default_rng(seed)
    q = draw.normal(size=(entries, time, group * kv_heads, width)) * width**-0.5
    k = draw.normal(size=(LAYERS, BLOCKS, ROWS, kv_heads, width, BLOCK))
    v = draw.normal(size=(LAYERS, BLOCKS, ROWS, kv_heads, BLOCK, width))
    start = draw.integers(0, SLOTS - time, entries)
    start[-1] = SLOTS - time // 2
    at = start[:, None] + np.arange(time)
    rows = draw.integers(0, ROWS, entries)
    q, k, v = (jnp.asarray(part, jnp.float32) for part in (q, k, v))
    return q, k, v, jnp.asarray(at, jnp.int32), jnp.asarray(rows, jnp.int32)


@pytest.mark.parametrize(
    ("entries", "time", "group", "kv_heads", "width"),
    [
        (5, 1, 1, 2, 16),
        (5, 2, 2, 2, 32),
        (7, 32, 2, 2, 32),
        (3, 9, 7, 2, 64),
        (4, 5, 3, 1, 48),
        (2, 33, 4, 2, 128),
    ],
)
def test_cache_attention_equals_that_of_xla(compiled, entries, time, group, kv_heads, width):
    q, k, v, at, rows = made(entries, time, group, kv_heads, width)
    layer, groups = jnp.int32(1), KVCache(k, v, SLOTS, slots_last=True).read_groups(at)
    expected = jax.jit(lambda: cache_attention(q, (k, v), layer, at, rows, groups, slots_last=True))()
    found = jax.jit(lambda: cpu_attention(q, k, v, layer, at, rows, SLOTS))()
    real = np.asarray(at < SLOTS)
    np.testing.assert_allclose(found[real], expected[real], rtol=1e-5, atol=1e-6)
    assert np.all(np.asarray(found)[~real] == 0)


def test_a_querys_bits_depend_only_on_its_row(compiled):
    """They do not depend on other entries, their order, or the number of queries per call."""
    q, k, v, at, rows = made(6, 12, 2, 2, 32)

    @jax.jit
    def attend(q, at, rows):
        return cpu_attention(q, k, v, jnp.int32(0), at, rows, SLOTS)

    whole = np.asarray(attend(q, at, rows))
    order = np.array([3, 5, 0, 4, 1, 2])
    np.testing.assert_array_equal(attend(q[order], at[order], rows[order]), whole[order])
    np.testing.assert_array_equal(attend(q[2:3], at[2:3], rows[2:3]), whole[2:3])
    for time in range(12):
        some = slice(time, time + 1)
        np.testing.assert_array_equal(attend(q[:, some], at[:, some], rows), whole[:, some])
    early = jnp.full_like(at, 10)
    later = k.at[..., 11:].set(1e9), v.at[..., 11:, :].set(1e36)
    seen, unseen = (cpu_attention(q, *pair, jnp.int32(0), early, rows, SLOTS) for pair in ((k, v), later))
    np.testing.assert_array_equal(seen, unseen)


def test_without_rows_entry_p_reads_row_p(compiled):
    q, k, v, at, _ = made(ROWS, 3, 2, 2, 16)
    own = jnp.arange(ROWS, dtype=jnp.int32)
    attend = jax.jit(cpu_attention, static_argnums=6)
    named, unnamed = (attend(q, k, v, jnp.int32(1), at, rows, SLOTS) for rows in (own, None))
    np.testing.assert_array_equal(named, unnamed)
    outside = attend(q, k, v, jnp.int32(1), at, own.at[2].set(ROWS), SLOTS)
    assert np.all(np.asarray(outside)[2] == 0)
    np.testing.assert_array_equal(np.delete(outside, 2, 0), np.delete(named, 2, 0))


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7FC000C0])
def test_nan_in_a_key_reaches_the_output(compiled, bits):
    q, k, v, at, rows = made(2, 4, 2, 2, 16)
    k = k.at[:, :, rows[0], :, 0, 0].set(jnp.asarray(np.uint32(bits).view(np.float32)))
    found = np.asarray(cpu_attention(q, k, v, jnp.int32(0), at, rows, SLOTS))
    assert np.isnan(found[0]).all()
    assert rows[0] == rows[1] or not np.isnan(found[1]).any()


@pytest.mark.parametrize("score", [280.0, 1e4])
def test_large_scores_do_not_overflow(compiled, score):
    q, k, v, at, rows = made(3, 4, 2, 2, 16)
    exact = jax.nn.one_hot(3, BLOCK * BLOCKS).reshape(BLOCKS, BLOCK)
    k = jnp.zeros_like(k).at[:, :, :, :, 0].set(score * exact[:, None, None])
    q = jnp.zeros_like(q).at[..., 0].set(1.0)
    at = jnp.maximum(at, 3)
    found = np.asarray(cpu_attention(q, k, v, jnp.int32(0), at, rows, SLOTS))
    real = np.asarray(at < SLOTS)
    wanted = np.repeat(np.asarray(v)[0, 0, np.asarray(rows), :, 3], 2, axis=1)[:, None]
    np.testing.assert_allclose(found[real], np.broadcast_to(wanted, found.shape)[real], rtol=1e-6)


def caches(config, rows, slots, threads=1):
    """Two empty caches: one for the CPU kernels and one for XLA."""
    kernels = CpuKernels(threads), None
    return [KVCache.create(config, rows, slots, slots_last=True, kernels=used) for used in kernels]


def prefill(decoder, tokens, at, cache, rows=None):
    return jax.jit(lambda: decoder.prefill(tokens, positions=at, cache=cache, rows=rows))()


def alike(one, other):
    for name in ("k", "v"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_equal_those_of_xla(compiled, shape):
    """Chunks of one text and of others, partly beyond the last slot, then single tokens."""
    config = SHAPES[shape]
    decoder, slots = make(config), 2 * BLOCK - 5
    tokens, rows = draw(config, 4, 70), jnp.array([3, 0, 3, 1])
    at = places(4, 70) + jnp.array([20, 0, 90, slots - 30])[:, None]
    real = np.asarray(at < slots)
    assert can_compute(config, jnp.float32)
    (found, ours), (wanted, theirs) = (
        extend(decoder, tokens, at, cache, rows) for cache in caches(config, 5, slots)
    )
    np.testing.assert_allclose(found[real], wanted[real], rtol=2e-5, atol=2e-5)
    assert not np.any(np.asarray(ours.k)[:, :, [2, 4]])
    alike(ours, theirs)
    ours, theirs = (prefill(decoder, tokens, at, cache, rows) for cache in caches(config, 5, slots))
    alike(ours, theirs)
    last = jnp.array([[160], [70], [slots], [20], [0]])
    (found, _), (wanted, _) = (extend(decoder, draw(config, 5, 1), last, cache) for cache in (ours, theirs))
    stored = np.array([0, 1, 3, 4])
    np.testing.assert_allclose(found[stored], wanted[stored], rtol=2e-5, atol=2e-5)


def test_tokens_without_a_slot_give_zeros(compiled):
    decoder, (cache, _) = make(BASE), caches(BASE, 3, 20)
    x, at = jnp.ones((3, 2, BASE.hidden)), jnp.array([[0, 1], [-1, 20], [5, 6]])
    weights = {str(path[-1]): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(decoder.layers))}
    angles = (jnp.ones((3, 2, BASE.head_dim // 2)),) * 2
    how = {"config": BASE, "slots": 20, "last_layer_attends": True}
    out, pair = cpu_layers(x, angles, weights, cache.k, cache.v, at, jnp.array([0, 1, 3]), **how)
    assert np.all(np.asarray(out)[1:] == 0) and np.all(np.asarray(out)[0] != 0)
    assert all(np.any(np.asarray(part)[:, :, 0]) and not np.any(np.asarray(part)[:, :, 1:]) for part in pair)


def test_very_negative_gates_give_zeros(compiled):
    """The exponential's smallest result is above 0, and times a very negative gate it would not be negligible."""
    decoder = nnx.clone(make(SHAPES["one-layer"]))
    decoder.embedding[...] = jnp.abs(decoder.embedding[...])
    decoder.layers.mlp_norm[...] = jnp.abs(decoder.layers.mlp_norm[...])
    decoder.layers.o[...] = jnp.zeros_like(decoder.layers.o[...])
    decoder.layers.gate[...] = -1e36 * jnp.abs(decoder.layers.gate[...])
    tokens, (ours, theirs) = draw(BASE, 2, 9), caches(decoder.config, 2, 20)
    (found, _), (wanted, _) = (extend(decoder, tokens, places(2, 9), cache) for cache in (ours, theirs))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_prefill_then_decode_equals_one_pass(compiled):
    decoder, tokens = make(BASE), draw(BASE, 3, 150)
    expected, (cache, _) = run(decoder, tokens, places(3, 150)), caches(BASE, 3, 200)
    cache = prefill(decoder, tokens[:, :140], places(3, 140), cache)
    for time in range(140, 150):
        some = tokens[:, time : time + 1]
        hidden, cache = extend(decoder, some, jnp.full((3, 1), time), cache)
        np.testing.assert_allclose(hidden, expected[:, time : time + 1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", ["qwen3", "large"])
def test_a_tokens_bits_depend_only_on_its_past(compiled, shape):
    """They do not depend on other rows, the number of tokens per call, or the number of threads."""
    config = SHAPES[shape]
    decoder, tokens = make(config), draw(config, 9, 150)
    (whole, ours), (threaded, others) = (
        extend(decoder, tokens, places(9, 150), caches(config, 9, 150, threads)[0]) for threads in (1, 4)
    )
    np.testing.assert_array_equal(threaded, whole)
    np.testing.assert_array_equal(others.k, ours.k)
    cache, rows = caches(config, 9, 150)[0], jnp.array([4, 2])
    for first, last in ((0, 77), (77, 78), (78, 150)):
        some = slice(first, last)
        hidden, cache = extend(decoder, tokens[rows, some], places(2, 150)[:, some], cache, rows)
        np.testing.assert_array_equal(hidden, whole[rows, some])
    np.testing.assert_array_equal(cache.k[:, :, rows], ours.k[:, :, rows])
    np.testing.assert_array_equal(cache.v[:, :, rows], ours.v[:, :, rows])


@pytest.mark.parametrize("which", ["kernel", "XLA"])
def test_a_token_of_nan_reaches_only_tokens_that_see_it(compiled, which):
    """It reaches neither earlier tokens, other rows, nor a later text in its row that ends before its position."""
    decoder, tokens = make(BASE), draw(BASE, 3, 40).at[0, 20].set(7).at[1:].add(1)
    tokens = jnp.where((tokens == 7) & (jnp.arange(120).reshape(3, 40) != 20), 8, tokens)
    cache = caches(BASE, 3, 60)[which == "XLA"]
    broken = nnx.clone(decoder)
    broken.embedding[...] = broken.embedding[...].at[7].set(jnp.nan)
    (healthy, _), (found, after) = (extend(d, tokens, places(3, 40), cache) for d in (decoder, broken))
    assert np.isnan(np.asarray(found)[0, 20:]).all()
    np.testing.assert_array_equal(found[0, :20], healthy[0, :20])
    np.testing.assert_array_equal(found[1:], healthy[1:])
    other = jnp.roll(tokens, 1, axis=0)[:, :10]
    (wanted, _), (again, _) = (extend(broken, other, places(3, 10), held) for held in (cache, after))
    np.testing.assert_array_equal(again, wanted)
    assert np.isfinite(np.asarray(wanted)).all()


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_copying_reads_all_sources_before_writing(compiled, threads):
    """Copies whole blocks and only those, also from a row that is itself a target. 0 threads: XLA."""
    draw = np.random.default_rng(0)
    held = [draw.normal(size=(LAYERS, BLOCKS, ROWS, 2, *last)) for last in ((16, BLOCK), (BLOCK, 16))]
    k, v = (jnp.asarray(part, jnp.float32) for part in held)
    cache = KVCache(k, v, SLOTS, slots_last=True, kernels=CpuKernels(threads) if threads else None)
    source, target = jnp.array([0, 1, 2, 2, 0, 1]), jnp.array([1, 2, 0, 3, ROWS, 4])
    slots, shared = jnp.array([200, 1, 2 * BLOCK, SLOTS, SLOTS, 0]), jnp.array([0, 0, BLOCK + 3, 5, 0, 0])
    found = jax.jit(lambda cache: cache.copy_rows(source, target, slots, shared))(cache)
    for name, before in (("k", k), ("v", v)):
        wanted, before = np.array(before), np.asarray(before)
        for row, blocks, of in (
            (1, slice(0, 2), 0),
            (2, slice(0, 1), 1),
            (0, slice(1, 2), 2),
            (3, slice(0, 3), 2),
        ):
            wanted[:, blocks, row] = before[:, blocks, of]
        np.testing.assert_array_equal(getattr(found, name), wanted)


def test_the_cpu_kernel_samples_only_if_it_computes_the_layers(compiled):
    untied = dataclasses.replace(BASE, vocab_size=96, tie_embeddings=False)
    ours, theirs = caches(untied, 2, 20)
    decoder = make(untied)
    assert decoder.sampling_table(ours) is not None and decoder.sampling_table(theirs) is None
    assert make(BASE).sampling_table(ours) is None  # 97 tokens are not a multiple of LANES
    tied = make(dataclasses.replace(BASE, vocab_size=96))
    assert tied.sampling_table(ours) is None  # its transposed table is not set
    add_lora(decoder, LoraConfig(rank=2), rngs=nnx.Rngs(0))
    assert decoder.sampling_table(ours) is None


def test_models_with_adapters_use_xla_until_they_are_merged(compiled):
    decoder = filled(BASE)
    add_lora(decoder, LoraConfig(rank=2), rngs=nnx.Rngs(0))
    for name in ("q_lora_b", "down_lora_b"):
        held = getattr(decoder.layers, name)
        held[...] = jax.random.normal(jax.random.key(1), held.shape) * 0.1
    tokens, (ours, theirs) = draw(BASE, 2, 9), caches(BASE, 2, 20)
    assert not decoder._layer_kernels(ours) and merge_lora(decoder)._layer_kernels(ours)
    wanted, _ = extend(decoder, tokens, places(2, 9), theirs)
    for model in (decoder, merge_lora(decoder)):
        found, _ = extend(model, tokens, places(2, 9), ours)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_transposed_embedding_gives_the_same_logits():
    decoder, hidden = make(BASE), jax.random.normal(jax.random.key(0), (2, 3, BASE.hidden))
    transposed = nnx.clone(decoder)
    transposed.transposed_embedding = decoder.embedding[...].T
    np.testing.assert_allclose(transposed.unembed(hidden), decoder.unembed(hidden), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changed", [{"hidden": 40}, {"mlp": 56}, {"head_dim": 24}])
def test_unsupported_shapes_use_xla(changed):
    config = dataclasses.replace(BASE, **changed)
    assert not can_compute(config, jnp.float32) and not can_compute(BASE, jnp.bfloat16)
    decoder, tokens, (cache, _) = filled(config), draw(config, 2, 9), caches(config, 2, 20)
    if config.head_dim % 16 == 0:
        found, _ = extend(decoder, tokens, places(2, 9), cache)
        np.testing.assert_allclose(found, run(decoder, tokens, places(2, 9)), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("dtype", "width"), [(jnp.bfloat16, 32), (jnp.float32, 8), (jnp.float32, 24)])
def test_unsupported_dtypes_and_head_dimensions_use_xla(dtype, width):
    assert not can_attend(dtype, width)


@pytest.mark.slow
def test_the_kernels_run_without_avx512(compiled, tmp_path, monkeypatch):
    """Compiles for the compiler's default instruction set."""
    monkeypatch.setattr(kernel_library, "NATIVE", "-w")
    library = ctypes.CDLL(str(kernel_library._compiled_library(tmp_path)))
    for name in ("ATTENTION", "LAYERS", "COPY", "DRAW"):
        target = getattr(kernel, name)
        monkeypatch.setattr(kernel, name, f"{target}_short")
        jax.ffi.register_ffi_target(
            f"{target}_short", jax.ffi.pycapsule(getattr(library, target)), platform="cpu"
        )
    for name, supported in (("float32", True), ("bfloat16", False), ("int8", False)):
        assert library.rrl_supports_format(FORMATS.index(name)) == supported
    q, k, v, at, rows = made(4, 21, 2, 2, 32)
    groups = KVCache(k, v, SLOTS, slots_last=True).read_groups(at)
    expected = cache_attention(q, (k, v), jnp.int32(1), at, rows, groups, slots_last=True)
    found = cpu_attention(q, k, v, jnp.int32(1), at, rows, SLOTS)
    real = np.asarray(at < SLOTS)
    np.testing.assert_allclose(found[real], expected[real], rtol=1e-5, atol=1e-6)
    decoder, tokens, at = make(SHAPES["large"]), draw(BASE, 3, 40), places(3, 40)
    (found, ours), (wanted, theirs) = (
        decoder.extend(tokens, positions=at, cache=cache) for cache in caches(decoder.config, 3, 50)
    )
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    alike(ours, theirs)
    for options in ({}, {"top_p": 0.8, "top_k": 30}):
        check_equals_sample(sampling_inputs(100, 64, 1664), options)
    several = [jnp.array(numbers) for numbers in ((0, 1), (1, 2), (0, 0), (1, 1))]
    for part, whole in zip(cpu_copy(ours.k, ours.v, *several), (ours.k, ours.v), strict=True):
        np.testing.assert_array_equal(part[:, 0, 1:], whole[:, 0, :2])
        np.testing.assert_array_equal(part[:, 0, 0], whole[:, 0, 0])
