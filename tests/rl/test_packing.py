"""Packing keeps every token, separates sequences, and wastes little space."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.errors import UserError
from rrl.rl.packing import first_fit_decreasing, pack, pack_buckets

LENGTH = 24
lengths = st.lists(st.integers(1, LENGTH), min_size=1, max_size=40)


def sequences(sizes, seed=0):
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(1, 1000, n).astype(np.int32) for n in sizes]
    return (
        tokens,
        [rng.random(n) < 0.5 for n in sizes],
        [rng.normal(size=n).astype(np.float32) for n in sizes],
    )


@settings(deadline=None, max_examples=60)
@given(lengths)
def test_unpacking_returns_every_sequence_with_its_per_token_arrays(sizes):
    tokens, loss, values = sequences(sizes)
    packed = pack(tokens, loss, LENGTH, extras={"advantage": values})
    batch = packed.batch
    for name, want in (("tokens", tokens), ("loss_mask", loss)):
        for got, one in zip(packed.unpack(getattr(batch, name), sizes), want, strict=True):
            expected = one.copy()
            if name == "loss_mask":
                expected[0] = False
            np.testing.assert_array_equal(got, expected)
    for got, one in zip(packed.unpack(batch.extras["advantage"], sizes), values, strict=True):
        np.testing.assert_array_equal(got, one)
    for got in packed.unpack(batch.positions, sizes):
        np.testing.assert_array_equal(got, np.arange(len(got)))
    assert batch.extras["advantage"].dtype == np.float32


@settings(deadline=None, max_examples=60)
@given(lengths)
def test_segments_are_contiguous_and_numbered_from_1_in_each_row(sizes):
    tokens, loss, _ = sequences(sizes)
    batch = pack(tokens, loss, LENGTH).batch
    assert (batch.segment_ids > 0).sum() == sum(sizes)
    for row in batch.segment_ids:
        real = row[row > 0]
        assert (row[: len(real)] > 0).all()
        assert set(np.diff(real)) <= {0, 1}
        assert len(real) == 0 or real[0] == 1
    padding = batch.segment_ids == 0
    assert (
        not batch.loss_mask[padding].any()
        and not batch.tokens[padding].any()
        and not batch.positions[padding].any()
    )


@settings(deadline=None, max_examples=60)
@given(lengths, st.integers(0, 5))
def test_the_number_of_rows_depends_only_on_the_lengths_and_is_near_the_bound(sizes, seed):
    order = np.random.default_rng(seed).permutation(len(sizes))
    counts = {first_fit_decreasing(np.array(s), LENGTH)[2] for s in (sizes, [sizes[i] for i in order])}
    assert len(counts) == 1
    # First-fit decreasing: at most 11/9 of the optimum plus 6/9 (Dosa, 2007).
    assert (
        counts.pop()
        <= 11 / 9 * max(-(-sum(sizes) // LENGTH), sum(s > LENGTH / 2 for s in sizes)) + 1 + len(sizes) / 9
    )


def test_the_number_of_rows_is_rounded_up_and_padded():
    tokens, loss, _ = sequences([24, 20, 3])
    assert pack(tokens, loss, LENGTH, multiple=4).batch.tokens.shape == (4, LENGTH)
    assert pack([], [], LENGTH, multiple=2).batch.tokens.shape == (2, LENGTH)


def test_a_sequence_that_is_too_long_is_refused_cut_or_dropped():
    tokens, loss, _ = sequences([30, 5])
    with pytest.raises(UserError, match=r"sequence 0 has 30 tokens, more than row_length=24"):
        pack(tokens, loss, LENGTH)
    cut = pack(tokens, loss, LENGTH, too_long="cut")
    np.testing.assert_array_equal(cut.batch.tokens[cut.row[0]][:24], tokens[0][:24])
    dropped = pack(tokens, loss, LENGTH, too_long="drop")
    assert dropped.row.tolist() == [-1, 0] and (dropped.batch.segment_ids > 0).sum() == 5


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 24), min_size=1, max_size=30))
def test_buckets_hold_every_sequence_once_and_unpack_its_values(sizes):
    tokens, loss, values = sequences(sizes)
    buckets = pack_buckets(tokens, loss, (6, 12, 24), (4, 2, 1), extras={"advantage": values})
    assert {b.tokens.shape for b in buckets.batches} <= {(4, 6), (2, 12), (1, 24)}
    assert sum(int((b.segment_ids > 0).sum()) for b in buckets.batches) == sum(sizes)
    for name, wanted in (("tokens", tokens), ("advantage", values)):
        held = [b.tokens if name == "tokens" else b.extras[name] for b in buckets.batches]
        for found, one in zip(buckets.unpack(held, sizes), wanted, strict=True):
            np.testing.assert_array_equal(found, one)
