"""Layers with a sliding window hold only the last positions of the cache, and all results stay those of one pass."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from rrl.models import cache as cache_module
from rrl.models.cache import KVCache, layer_blocks
from rrl.models.config import DecoderConfig
from rrl.plan.policy_shape import PUBLISHED
from tests.models.conftest import ODD
from tests.models.small import SMALL, draw, extend, make, places, run

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
LENGTH = 61
SLIDING = [name for name, config in ODD.items() if config.sliding_layers]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 slots, and parts of up to 9 tokens: a window of 5 needs 13 slots, so that 3 blocks are one slot too few."""
    monkeypatch.setattr(cache_module, "BLOCK", 4)
    monkeypatch.setattr(cache_module, "WRITE_TOKENS", 9)


def extended(config, tokens, chunk, cache):
    """Outputs of all tokens, `chunk` of them a call, and the cache after them."""
    parts = []
    for start in range(0, tokens.shape[1], chunk):
        part = tokens[:, start : start + chunk]
        # Padding up to the length of a chunk: the number of shapes to compile stays small.
        padding = chunk - part.shape[1]
        at = jnp.pad(
            start + places(len(part), part.shape[1]), ((0, 0), (0, padding)), constant_values=cache.slots
        )
        hidden, cache = extend(make(config), jnp.pad(part, ((0, 0), (0, padding))), at, cache)
        parts.append(hidden[:, : part.shape[1]])
    return jnp.concatenate(parts, axis=1), cache


def cases():
    """Gemma 3 with a window of 5 is quick, all else slow."""
    for name in SLIDING:
        for window in (1, 5, 12, LENGTH):
            quick = name == "gemma3" and window == 5
            yield pytest.param(name, window, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "window"), cases())
@pytest.mark.parametrize(
    "chunk", [9, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, LENGTH))]
)
def test_a_cache_of_the_last_positions_gives_the_outputs_of_one_pass(name, window, chunk):
    config = dataclasses.replace(ODD[name], sliding_window=window)
    tokens = draw(config, 2, LENGTH)
    hidden, _ = extended(config, tokens, chunk, KVCache.create(config, 2, LENGTH, slots_last=chunk == 9))
    np.testing.assert_allclose(hidden, run(make(config), tokens, places(2, LENGTH)), **TOLERANCE)


GEMMA3 = ODD["gemma3"]


def test_chunks_of_one_row_in_one_call_may_overwrite_what_the_first_of_them_reads():
    tokens, length = draw(GEMMA3, 1, 45), 45
    expected = run(make(GEMMA3), tokens, places(1, length))
    cache = KVCache.create(GEMMA3, 3, length)
    chunks, at, rows = tokens.reshape(15, 3), places(1, length).reshape(15, 3), jnp.ones(15, int)
    for batches in ((), (1,)):
        hidden, after = extend(make(GEMMA3), chunks, at, cache, rows, batches)
        np.testing.assert_allclose(hidden.reshape(expected.shape), expected, **TOLERANCE)
        assert all(not part[:, :, jnp.array([0, 2])].any() for part in (after.k, after.v))
    long_chunks = extend(make(GEMMA3), tokens.reshape(3, 15), at.reshape(3, 15), cache, rows[:3])
    np.testing.assert_allclose(long_chunks[0].reshape(expected.shape), expected, **TOLERANCE)
    for one, other in ((long_chunks[1].k, after.k), (long_chunks[1].v, after.v)):
        np.testing.assert_allclose(one, other, **TOLERANCE)


@pytest.mark.parametrize("attention_batches", [(2,), (3, 1)])
def test_reading_rows_in_groups_does_not_change_the_bits(attention_batches):
    tokens, at = draw(GEMMA3, 6, 40), jnp.array([9, 40, 48, 3, 23, 17])[:, None]  # the third entry is padding
    _, cache = extended(GEMMA3, tokens, 9, KVCache.create(GEMMA3, 6, 48))
    token, kept = draw(GEMMA3, 6, 1, seed=1), np.array([0, 1, 3, 4, 5])
    whole, _ = extend(make(GEMMA3), token, at, cache)
    grouped, _ = extend(make(GEMMA3), token, at, cache, None, attention_batches)
    assert jnp.isfinite(grouped).all()
    np.testing.assert_array_equal(whole[kept], grouped[kept])


def test_rejected_draft_tokens_and_an_earlier_longer_text_leave_no_trace():
    tokens, other = draw(GEMMA3, 2, 40), draw(GEMMA3, 2, LENGTH, seed=1)
    _, cache = extended(GEMMA3, other, 9, KVCache.create(GEMMA3, 2, LENGTH))
    hidden = []
    for start in range(0, 40, 2):  # two tokens are accepted, four drafts are rejected
        drafted = jnp.concatenate([tokens[:, start : start + 2], other[:, start : start + 4]], axis=1)
        out, cache = extend(make(GEMMA3), drafted, start + places(2, 6), cache)
        hidden.append(out[:, :2])
    expected = run(make(GEMMA3), tokens, places(2, 40))
    np.testing.assert_allclose(jnp.concatenate(hidden, axis=1), expected, **TOLERANCE)


@pytest.mark.parametrize(("prefix", "shared"), [(3, 0), (29, 0), (29, 22)])
def test_copied_rows_continue_like_their_source(prefix, shared):
    tokens, other = draw(GEMMA3, 1, 40), draw(GEMMA3, 2, 40, seed=1)
    texts = jnp.concatenate([tokens, other]).at[1, :shared].set(tokens[0, :shared])
    _, cache = extended(GEMMA3, texts[:, :prefix], 9, KVCache.create(GEMMA3, 3, 40))
    # Row 0 has gone on when row 1 gets its prefix. Row 2 gets that of row 1, as it was before.
    at = jnp.concatenate([prefix + places(1, 3), jnp.full((2, 3), 40)])
    _, cache = extend(make(GEMMA3), texts[:, prefix : prefix + 3], at, cache)
    copied = cache.copy_rows(
        jnp.array([0, 1]), jnp.array([1, 2]), jnp.full(2, prefix), jnp.array([shared, 0])
    )
    rest, rows = texts[:2, prefix:], jnp.array([1, 2])
    hidden, _ = extend(make(GEMMA3), rest, prefix + places(2, 40 - prefix), copied, rows)
    expected = run(make(GEMMA3), texts[:2], places(2, 40))[:, prefix:]
    np.testing.assert_allclose(hidden, expected, **TOLERANCE)


def test_the_arrays_have_no_slots_for_positions_outside_the_windows():
    cache = KVCache.create(GEMMA3, 2, 400)
    assert cache.blocks == (4, 4, 100, 4)
    assert cache.k.nbytes == cache.v.nbytes == 112 * 4 * 2 * GEMMA3.kv_heads * GEMMA3.head_dim * 4
    assert KVCache.create(GEMMA3, 2, 12).blocks == (3, 3, 3, 3)  # all positions: nothing is overwritten


def test_a_model_without_windows_holds_all_positions_of_all_layers():
    cache = KVCache.create(SMALL, 2, 400)
    assert cache.blocks == () and cache.k.shape[:2] == (SMALL.layers, 100)


def test_a_layer_holds_its_window_and_the_tokens_of_a_part(monkeypatch):
    monkeypatch.undo()
    config = DecoderConfig.from_hf(PUBLISHED["gemma-3-4b"])
    assert layer_blocks(config, 8192) == (*((10,) * 5 + (64,)) * 5, *(10,) * 4)  # (1024 + 255) / 128 slots
