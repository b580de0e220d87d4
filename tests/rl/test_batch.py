"""Rows of a batch."""

import numpy as np

from rrl.rl.batch import take_rows
from rrl.rl.packing import pack


def test_take_rows_gives_padding_for_row_minus_1():
    rng = np.random.default_rng(0)
    tokens, values = ([rng.integers(1, 9, n).astype(np.int32) for n in (24, 20)] for _ in range(2))
    masks = [np.ones(len(t), bool) for t in tokens]
    packed = pack(tokens, masks, 24, extras={"a": values}, branches=values).batch
    batch = take_rows(packed, np.array([1, -1]))
    np.testing.assert_array_equal(batch.tokens[0], packed.tokens[1])
    for padding in (batch.tokens, batch.segment_ids, batch.loss_mask, batch.branches, batch.extras["a"]):
        assert not padding[1].any()
