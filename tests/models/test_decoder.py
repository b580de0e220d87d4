"""The decoder gives the same results packed or not, padded or not, in one pass or step by step, with any remat."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.errors import UserError
from rrl.models.cache import BLOCK, KVCache
from rrl.models.decoder import Decoder
from tests.models.conftest import ODD
from tests.models.small import SMALL, draw, extend, make, places, run

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def test_prefill_then_decode_equals_one_pass(config):
    decoder, tokens = make(config), draw(config, 3, 18)
    expected = run(decoder, tokens, places(3, 18))
    hidden, cache = extend(decoder, tokens[:, :13], places(3, 13), KVCache.create(config, rows=3, slots=24))
    parts = [hidden]
    for t in range(13, 18):
        hidden, cache = extend(decoder, tokens[:, t : t + 1], jnp.full((3, 1), t), cache)
        parts.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, **TOLERANCE)


def test_decoding_in_a_while_loop_across_blocks_equals_one_pass():
    length = 2 * BLOCK + 9
    decoder, tokens = make(SMALL), draw(SMALL, 2, length)
    expected = run(decoder, tokens, places(2, length))

    @jax.jit
    def decode(cache):
        def step(carry):
            t, cache, out = carry
            token = jax.lax.dynamic_slice_in_dim(tokens, t, 1, axis=1)
            hidden, cache = decoder.extend(token, positions=jnp.full((2, 1), t), cache=cache)
            return t + 1, cache, jax.lax.dynamic_update_slice_in_dim(out, hidden, t, axis=1)

        start = (jnp.int32(0), cache, jnp.zeros_like(expected))
        return jax.lax.while_loop(lambda carry: carry[0] < length, step, start)[2]

    np.testing.assert_allclose(decode(KVCache.create(SMALL, 2, length)), expected, **TOLERANCE)


def test_the_cache_is_updated_in_place_inside_a_while_loop():
    decoder = make(SMALL)
    cache = KVCache.create(SMALL, rows=8, slots=8 * BLOCK)

    def step(carry):
        t, cache = carry
        positions = jnp.full((8, 1), t)
        return t + 1, decoder.extend(jnp.zeros((8, 1), int), positions=positions, cache=cache)[1]

    loop = jax.jit(
        lambda cache: jax.lax.while_loop(lambda carry: carry[0] < 9, step, (jnp.int32(0), cache)),
        donate_argnums=0,
    )
    temporary = loop.lower(cache).compile().memory_analysis().temp_size_in_bytes
    assert temporary < cache.k[0].nbytes


@pytest.mark.parametrize("length", [1, 5])
def test_the_generation_program_does_not_grow_with_the_number_of_layers(length):
    def lines(layers):
        config = dataclasses.replace(SMALL, layers=layers)
        graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

        def step(state, cache):
            decoder = nnx.merge(graph, state)
            return decoder.extend(jnp.zeros((2, length), int), positions=places(2, length), cache=cache)

        cache = jax.eval_shape(lambda: KVCache.create(config, 2, 8))
        return jax.jit(step).lower(state, cache).as_text().count("\n")

    assert lines(9) == lines(2)


def test_cache_rows_are_extended_at_different_positions_and_other_rows_stay():
    decoder, tokens = make(SMALL), draw(SMALL, 2, 12)
    expected = run(decoder, tokens, places(2, 12))
    cache = KVCache.create(SMALL, rows=4, slots=16)
    # Entries 0 and 1 belong to cache rows 3 and 1; entry 1 is 4 tokens behind and padded with positions >= S.
    rows = jnp.array([3, 1])
    first = jnp.where(jnp.arange(8) < jnp.array([[8], [4]]), jnp.arange(8), cache.slots)
    _, cache = extend(decoder, tokens[:, :8], first, cache, rows)
    chunk = jnp.stack([tokens[0, 8:12], tokens[1, 4:8]])
    hidden, after = extend(decoder, chunk, jnp.array([[8], [4]]) + jnp.arange(4), cache, rows)
    np.testing.assert_allclose(hidden[0], expected[0, 8:12], **TOLERANCE)
    np.testing.assert_allclose(hidden[1], expected[1, 4:8], **TOLERANCE)
    assert all(not part[:, :, jnp.array([0, 2])].any() for part in (after.k, after.v))


def test_positions_beyond_the_slots_are_dropped_even_if_the_last_block_has_space():
    cache = KVCache.create(SMALL, rows=1, slots=10)
    _, cache = extend(make(SMALL), draw(SMALL, 1, 4), jnp.array([[9, 10, 11, 500]]), cache)
    assert cache.k[0, 0, 0, :, 9].any()
    assert int((cache.k[0] != 0).any(axis=(-1, -3)).sum()) == 1


def test_a_row_number_beyond_the_cache_is_ignored():
    cache = KVCache.create(SMALL, rows=2, slots=10)
    hidden, cache = extend(make(SMALL), draw(SMALL, 1, 4), places(1, 4), cache, jnp.array([2]))
    assert not any(part.any() for part in (cache.k, cache.v))
    assert jnp.isfinite(hidden).all()


def test_a_rows_bits_do_not_depend_on_the_positions_of_other_rows():
    decoder, past = make(SMALL), 3 * BLOCK
    _, cache = extend(decoder, draw(SMALL, 2, past), places(2, past), KVCache.create(SMALL, 2, past + 8))
    token = draw(SMALL, 2, 1, seed=1)
    near, far = (extend(decoder, token, jnp.array([[40], [other]]), cache)[0][0] for other in (41, past))
    np.testing.assert_array_equal(near, far)


@pytest.mark.parametrize("past", [40, BLOCK + 3])
def test_the_layout_with_slots_last_gives_the_same_outputs(past):
    decoder, found = make(SMALL), []
    for slots_last in (False, True):
        cache = KVCache.create(SMALL, 2, past + 1, slots_last=slots_last)
        _, cache = extend(decoder, draw(SMALL, 2, past), places(2, past), cache)
        found.append(extend(decoder, draw(SMALL, 2, 1), jnp.full((2, 1), past), cache))
    np.testing.assert_allclose(found[0][0], found[1][0], **TOLERANCE)
    np.testing.assert_array_equal(found[0][1].k, found[1][1].k.swapaxes(-1, -2))


@pytest.mark.parametrize("attention_batches", [(), (1,)])
def test_prefill_gives_the_same_cache_as_extend(attention_batches):
    decoder, at, rows = make(SMALL), jnp.arange(24).reshape(3, 8), jnp.array([1, 1, 0])
    empty = KVCache.create(SMALL, 3, 40)
    _, extended = extend(decoder, draw(SMALL, 3, 8), at, empty, rows, attention_batches)
    prefilled = nnx.jit(
        lambda decoder, tokens: decoder.prefill(
            tokens, positions=at, cache=empty, rows=rows, attention_batches=attention_batches
        )
    )(decoder, draw(SMALL, 3, 8))
    for one, other in ((extended.k, prefilled.k), (extended.v, prefilled.v)):
        assert one.any()
        np.testing.assert_allclose(one, other, **TOLERANCE)


@pytest.mark.parametrize("attention_batches", [(1,), (2,), (3, 1), (6, 4, 2, 1)])
def test_reading_the_cache_in_groups_does_not_change_the_bits(attention_batches):
    decoder, past = make(SMALL), 3 * BLOCK
    _, cache = extend(decoder, draw(SMALL, 6, past), places(6, past), KVCache.create(SMALL, 6, past + 8))
    at = jnp.array([40, past, past + 8, BLOCK, 5, 2 * BLOCK - 1])[:, None]  # the third entry is padding
    token = draw(SMALL, 6, 1, seed=1)
    for rows in (None, jnp.array([3, 0, 1, 5, 4, 2])):
        whole, one = extend(decoder, token, at, cache, rows)
        grouped, other = extend(decoder, token, at, cache, rows, attention_batches=attention_batches)
        for first, second in ((whole, grouped), (one.k, other.k), (one.v, other.v)):
            assert jnp.isfinite(second).all()
            if first is whole:
                first, second = (jnp.delete(hidden, 2, axis=0) for hidden in (first, second))
            np.testing.assert_array_equal(first, second)


SLIDING = dataclasses.replace(SMALL, layers=3, sliding_window=BLOCK + 9, sliding_layers=(True, False, True))


def test_a_window_across_blocks_gives_the_same_outputs_in_one_pass_and_from_the_cache():
    decoder, length = make(SLIDING), 3 * BLOCK + 5
    tokens = draw(SLIDING, 2, length)
    expected = run(decoder, tokens, places(2, length))
    assert (
        np.abs(expected - run(make(dataclasses.replace(SMALL, layers=3)), tokens, places(2, length))).max()
        > 0.01
    )
    for chunk in (length, 31):
        cache, parts = KVCache.create(SLIDING, 2, length), []
        for start in range(0, length, chunk):
            part = tokens[:, start : start + chunk]
            hidden, cache = extend(decoder, part, start + places(2, part.shape[1]), cache)
            parts.append(hidden)
        np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, **TOLERANCE)


@pytest.mark.parametrize("attention_batches", [(2,), (3, 1)])
def test_reading_windows_of_rows_in_groups_does_not_change_the_bits(attention_batches):
    decoder, past = make(SLIDING), 4 * BLOCK
    _, cache = extend(decoder, draw(SLIDING, 6, past), places(6, past), KVCache.create(SLIDING, 6, past + 8))
    at = jnp.array([40, past, past + 8, BLOCK, 3 * BLOCK, 2 * BLOCK - 1])[
        :, None
    ]  # the third entry is padding
    token = draw(SLIDING, 6, 1, seed=1)
    whole, _ = extend(decoder, token, at, cache)
    grouped, _ = extend(decoder, token, at, cache, attention_batches=attention_batches)
    alone = [extend(decoder, token[i : i + 1], at[i : i + 1], cache, jnp.array([i]))[0][0] for i in range(6)]
    assert jnp.isfinite(grouped).all()
    kept = np.array([0, 1, 3, 4, 5])
    np.testing.assert_array_equal(whole[kept], grouped[kept])
    np.testing.assert_allclose(jnp.stack(alone)[kept], grouped[kept], **TOLERANCE)


def test_read_groups_are_sorted_by_length_and_know_each_entrys_blocks():
    cache = KVCache.create(SMALL, 6, 4 * BLOCK)
    at = jnp.array([40, 3 * BLOCK, 4 * BLOCK, BLOCK, 5, 4 * BLOCK])[:, None]
    groups = cache.read_groups(at, (2, 1))
    assert groups.order.tolist() == [[1, 3], [0, 4], [2, 5]]
    assert groups.needed.tolist() == [[4, 2], [1, 1], [0, 0]] and groups.batch_sizes == (2, 1)
    for all_at_once in ((), (4,), (6,)):
        groups = cache.read_groups(at, all_at_once)
        assert groups.order is None and groups.needed.tolist() == [[4]]


def test_chunks_of_one_text_may_be_prefilled_together():
    decoder, tokens = make(SMALL), draw(SMALL, 1, 24)
    empty = KVCache.create(SMALL, 3, 40)
    whole, one = extend(decoder, tokens, places(1, 24), empty, jnp.array([1]))
    pieces, other = extend(
        decoder, tokens.reshape(3, 8), jnp.arange(24).reshape(3, 8), empty, jnp.array([1, 1, 1]), (1,)
    )
    np.testing.assert_allclose(pieces.reshape(whole.shape), whole, **TOLERANCE)
    np.testing.assert_allclose(other.k, one.k, **TOLERANCE)


def test_packed_segments_equal_separate_rows(config):
    decoder, lengths = make(config), (5, 9, 4)
    tokens = draw(config, 1, sum(lengths) + 3)
    segments = jnp.asarray(np.repeat([1, 2, 3, 0], (*lengths, 3)))[None]
    positions = jnp.asarray(np.concatenate([np.arange(n) for n in (*lengths, 3)]))[None]
    packed, start = run(decoder, tokens, positions, segments), 0
    for length in lengths:
        alone = run(decoder, tokens[:, start : start + length], places(1, length))
        np.testing.assert_allclose(packed[:, start : start + length], alone, **TOLERANCE)
        start += length


def test_padding_never_changes_a_row():
    decoder, tokens = make(SMALL), draw(SMALL, 2, 150)
    segments = (places(2, 150) < 140).astype(jnp.int32)
    other = tokens.at[:, 140:].set((tokens[:, 140:] + 7) % SMALL.vocab_size)
    first, second = (run(decoder, t, places(2, 150), segments)[:, :140] for t in (tokens, other))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, run(decoder, tokens[:, :140], places(2, 140)), **TOLERANCE)


@pytest.mark.parametrize("config", [SMALL, ODD["gemma3"]], ids=["qwen2", "gemma3"])
def test_remat_variants_give_the_same_loss_and_gradients(config):
    tokens = draw(config, 2, 12)

    def gradients(remat):
        graph, state = nnx.split(make(config, remat=remat))

        def loss(state):
            decoder = nnx.merge(graph, state)
            return jnp.mean(decoder.unembed(decoder(tokens, positions=places(2, 12))) ** 2)

        return jax.jit(jax.value_and_grad(loss))(state)

    plain = gradients("none")
    for remat in ("dots", "full"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, gradients(remat)
        )


def test_bfloat16_is_close_to_float32_and_logits_are_float32():
    tokens = draw(SMALL, 2, 12)
    full, half = make(SMALL), make(SMALL, dtype=jnp.bfloat16)
    logits = [d.unembed(run(d, tokens, places(2, 12))) for d in (full, half)]
    assert logits[1].dtype == jnp.float32
    assert jnp.linalg.norm(logits[0] - logits[1]) < 2e-2 * jnp.linalg.norm(logits[0])
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(half)))


@pytest.mark.parametrize(
    ("field", "words"),
    [("remat", r"remat='some'.*none, dots, full"), ("attention", r"attention='some'.*xla, cudnn, splash")],
)
def test_unknown_values_are_refused_by_field(field, words):
    with pytest.raises(UserError, match=words):
        Decoder(SMALL, rngs=nnx.Rngs(0), **{field: "some"})
