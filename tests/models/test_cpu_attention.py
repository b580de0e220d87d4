"""The compiled attention of processors gives XLA's numbers, and each query's whatever comes with it; without a compiler, none."""

import ctypes
import logging
import stat
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrl.models import cpu_attention as kernel
from rrl.models.attention import cache_attention
from rrl.models.cache import BLOCK, KVCache
from rrl.models.cpu_attention import can_attend, cpu_attention

LAYERS, BLOCKS, ROWS = 2, 3, 5
SLOTS = BLOCKS * BLOCK - 7


@pytest.fixture
def compiled():
    if not can_attend(jnp.float32, 16):
        pytest.skip("this machine has no C++ compiler")


def made(entries, time, group, kv_heads, width, seed=0):
    """Queries, keys and values of normal numbers, and positions: half of the last entry's lie behind the last slot."""
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
def test_it_gives_the_numbers_of_xla(compiled, entries, time, group, kv_heads, width):
    q, k, v, at, rows = made(entries, time, group, kv_heads, width)
    layer, groups = jnp.int32(1), KVCache(k, v, SLOTS, slots_last=True).groups(at)
    expected = jax.jit(lambda: cache_attention(q, k, v, layer, at, rows, groups, (), slots_last=True))()
    found = jax.jit(lambda: cpu_attention(q, k, v, layer, at, rows, SLOTS))()
    real = np.asarray(at < SLOTS)
    np.testing.assert_allclose(found[real], expected[real], rtol=1e-5, atol=1e-6)
    assert np.all(np.asarray(found)[~real] == 0)


def test_a_querys_bits_depend_on_its_row_alone(compiled):
    """Not on those beside it, their order, or how many come at a time."""
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


def test_rows_are_their_own_where_none_are_named(compiled):
    q, k, v, at, _ = made(ROWS, 3, 2, 2, 16)
    own = jnp.arange(ROWS, dtype=jnp.int32)
    attend = jax.jit(cpu_attention, static_argnums=6)
    named, unnamed = (attend(q, k, v, jnp.int32(1), at, rows, SLOTS) for rows in (own, None))
    np.testing.assert_array_equal(named, unnamed)
    outside = attend(q, k, v, jnp.int32(1), at, own.at[2].set(ROWS), SLOTS)
    assert np.all(np.asarray(outside)[2] == 0)
    np.testing.assert_array_equal(np.delete(outside, 2, 0), np.delete(named, 2, 0))


def test_what_is_not_a_number_is_not_hidden(compiled):
    q, k, v, at, rows = made(2, 4, 2, 2, 16)
    k = k.at[:, :, rows[0], :, 0, 0].set(jnp.nan)
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


@pytest.mark.parametrize(("dtype", "width"), [(jnp.bfloat16, 32), (jnp.float32, 8), (jnp.float32, 24)])
def test_other_numbers_and_heads_are_left_to_xla(dtype, width):
    assert not can_attend(dtype, width)


def test_it_is_compiled_once(compiled, tmp_path, monkeypatch):
    first, run = kernel._library(tmp_path), subprocess.run

    def only_asked(command, **how):
        assert command[1:] == ["--version"]
        return run(command, **how)

    monkeypatch.setattr(subprocess, "run", only_asked)
    assert kernel._library(tmp_path) == first and [*tmp_path.iterdir()] == [first]


def test_it_runs_where_vectors_are_short(compiled, tmp_path, monkeypatch):
    """Compiled for the oldest processors that the compiler knows."""
    monkeypatch.setattr(kernel, "NATIVE", "-w")
    library = ctypes.CDLL(str(kernel._library(tmp_path)))
    monkeypatch.setattr(kernel, "TARGET", "rrl_cache_attention_short")
    address = jax.ffi.pycapsule(library.rrl_cache_attention)
    jax.ffi.register_ffi_target("rrl_cache_attention_short", address, platform="cpu")
    q, k, v, at, rows = made(4, 21, 2, 2, 32)
    groups = KVCache(k, v, SLOTS, slots_last=True).groups(at)
    expected = cache_attention(q, k, v, jnp.int32(1), at, rows, groups, (), slots_last=True)
    found = cpu_attention(q, k, v, jnp.int32(1), at, rows, SLOTS)
    real = np.asarray(at < SLOTS)
    np.testing.assert_allclose(found[real], expected[real], rtol=1e-5, atol=1e-6)


def test_without_a_compiler_a_warning_says_so(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert not kernel._register.__wrapped__()
    assert "There is no C++ compiler." in caplog.text and "CXX" in caplog.text


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path, caplog):
    broken = tmp_path / "c++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken && exit 0\necho out of order >&2\nexit 1\n'
    )
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        assert not kernel._register.__wrapped__()
    assert "out of order" in caplog.text
