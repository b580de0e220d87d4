"""Block-sparse attention equals textbook attention for any segments and branches, and skips blocks without a common one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrl.models.attention_backends import packed_attention
from rrl.models.block_attention import BLOCK, block_attention
from rrl.parallel.mesh import make_mesh
from tests.models.small import textbook_attention

TIME = 3 * BLOCK + 8  # not a multiple of a block


def draw(rows=2, time=TIME, kv_heads=2, dtype=jnp.float32):
    """q, k, v and the output's gradient, with 4 query heads of dimension 8."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(rows, time, heads, 8) for heads in (4, kv_heads, kv_heads, 4)]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)]


@functools.cache
def with_gradients(attention):
    """Output and gradients of q, k and v, jitted once for all tests with a shape."""

    def run(segments, q, k, v, grad):
        out, back = jax.vjp(lambda *x: attention(*x, segments), q, k, v)
        return (out, *back(grad))

    return jax.jit(run)


def close(ours, theirs, tolerance=1e-5):
    """Equality up to rounding relative to the output's size, since some gradients are small differences of large terms."""
    least = np.abs(np.asarray(theirs[0], np.float32)).max()
    for one, other in zip(ours, theirs, strict=True):
        other = np.asarray(other, np.float32)
        np.testing.assert_allclose(
            np.asarray(one, np.float32), other, atol=tolerance * max(np.abs(other).max(), least)
        )


def segmentations():
    """Segment ids of two rows: packed with and without padding, one segment, and orders that packing never makes."""
    draws = np.random.default_rng(0)
    for number in (1, 2, 3, 5, 20, TIME - 1):
        cuts = np.sort(draws.integers(1, TIME, (2, number - 1)))
        segments = 1 + (np.arange(TIME) >= cuts[..., None]).sum(1)
        yield segments
        yield np.where(np.arange(TIME) < draws.integers(0, TIME, (2, 1)), segments, 0)
    yield np.zeros((2, TIME))
    yield np.tile(1 + np.arange(TIME) // BLOCK, (2, 1))  # segments end where blocks end
    yield np.tile(9 - np.arange(TIME) // 25, (2, 1))  # descending ids
    yield draws.integers(0, 4, (2, TIME))  # neither sorted nor contiguous


def test_outputs_and_gradients_equal_textbook_attention_for_any_segments():
    inputs = draw()
    ours, theirs = with_gradients(block_attention), with_gradients(textbook_attention)
    for segments in segmentations():
        segments = jnp.asarray(segments, jnp.int32)
        close(ours(segments, *inputs), theirs(segments, *inputs))


def test_without_segment_ids_each_row_is_one_segment():
    *qkv, _ = draw()
    whole = jnp.ones(qkv[0].shape[:2], jnp.int32)
    np.testing.assert_array_equal(block_attention(*qkv), block_attention(*qkv, whole))


@pytest.mark.parametrize("time", [1, 33])
def test_rows_may_be_shorter_than_a_block(time):
    inputs, segments = draw(1, time, kv_heads=4), jnp.asarray(np.arange(time)[None] // 20, jnp.int32)
    close(
        with_gradients(block_attention)(segments, *inputs),
        with_gradients(textbook_attention)(segments, *inputs),
    )


def test_bfloat16_is_close_to_float32():
    segments = jnp.asarray(np.tile(np.repeat([1, 2, 0], [90, 100, 10]), (2, 1)), jnp.int32)
    half = draw(dtype=jnp.bfloat16)
    full = [x.astype(jnp.float32) for x in half]
    found = with_gradients(block_attention)(segments, *half)
    assert all(x.dtype == jnp.bfloat16 for x in found)
    close(found, with_gradients(textbook_attention)(segments, *full), 2e-2)


def test_blocks_of_other_segments_are_never_read():
    """NaN times a weight of 0 is NaN, so only blocks that are skipped keep the output finite."""
    rows = [[1, 2, 3, 0], [4, 7, 9, 0]]
    segments = jnp.asarray(np.repeat(rows, BLOCK, axis=1)[:, :TIME], jnp.int32)
    inputs, run = draw(), with_gradients(block_attention)
    clean = run(segments, *inputs)
    for inside in (np.arange(TIME) // BLOCK == place for place in range(4)):
        poisoned = [x.at[:, inside].set(jnp.nan) for x in inputs]
        for one, other in zip(run(segments, *poisoned), clean, strict=True):
            assert np.isnan(one[:, inside]).all()
            np.testing.assert_array_equal(one[:, ~inside], other[:, ~inside])


def test_blocks_before_the_window_are_never_read():
    *qkv, _ = draw()
    positions = jnp.tile(jnp.arange(TIME), (2, 1))
    poisoned = [x.at[:, :BLOCK].set(jnp.nan) for x in qkv]
    clean, found = (block_attention(*x, None, None, positions, jnp.int32(BLOCK)) for x in (qkv, poisoned))
    np.testing.assert_array_equal(found[:, 2 * BLOCK :], clean[:, 2 * BLOCK :])
    assert np.isnan(found[:, : 2 * BLOCK - 1]).all()


BRANCHES = np.array(
    [
        np.repeat([0, 1, 2, 0, 1, 3, 0], [30, 100, 20, 10, 24, 10, 6]),
        np.repeat([0, 1, 0, 2, 3, 0, 0], [5, 64, 1, 80, 20, 10, 20]),
    ]
)
"""Branches of up to three blocks, branch numbers that recur in the row's second segment, and padding."""
SEGMENTS = np.array([np.repeat([1, 2, 0], [160, 34, 6]), np.repeat([1, 2, 0], [69, 111, 20])])


def test_outputs_and_gradients_equal_textbook_attention_with_branches():
    inputs, segments = draw(), jnp.asarray(SEGMENTS)
    branches = jnp.asarray(BRANCHES)
    ours = with_gradients(lambda q, k, v, ids: block_attention(q, k, v, ids, branches))
    # One textbook attention per branch, in which the branch and the trunk form one segment.
    parts = []
    for branch in range(4):
        inside = (branches == 0) | (branches == branch)
        apart = jnp.where(inside, segments, 100 + branches)  # other tokens must not see these
        parts.append(
            with_gradients(textbook_attention)(apart, *inputs[:3], inputs[3] * _of(branches, branch))
        )
    out = sum(part[0] * _of(branches, branch) for branch, part in enumerate(parts))
    gradients = (sum(part[place] for part in parts) for place in (1, 2, 3))
    close(ours(segments, *inputs), (out, *gradients))


def _of(branches, branch):
    """1 on tokens of that branch."""
    return (branches == branch)[..., None, None].astype(jnp.float32)


def test_blocks_of_other_branches_are_never_read():
    """Blocks: trunk, branch, another branch, rest of the trunk. NaN in a branch reaches only that branch and the gradients of
    the tokens that it sees."""
    branches = jnp.asarray(np.repeat([[0, 1, 2, 0]], BLOCK, axis=1)[:, :TIME].repeat(2, 0), jnp.int32)
    inputs, segments = draw(), jnp.ones((2, TIME), jnp.int32)
    run = with_gradients(lambda q, k, v, ids: block_attention(q, k, v, ids, branches))
    inside, trunk = np.arange(TIME) // BLOCK == 1, np.arange(TIME) // BLOCK == 0
    found = run(segments, *(x.at[:, inside].set(jnp.nan) for x in inputs[:3]), inputs[3])
    for name, one, other in zip(("out", "q", "k", "v"), found, run(segments, *inputs), strict=True):
        assert np.isnan(one[:, inside]).any()
        clean = ~inside & ~(trunk & (name in "kv"))
        np.testing.assert_array_equal(one[:, clean], other[:, clean])


def test_memory_grows_linearly_with_the_row_length():
    def needed(time):
        inputs = jax.eval_shape(lambda: draw(time=time))
        segments = jax.ShapeDtypeStruct((2, time), jnp.int32)
        compiled = with_gradients(block_attention).lower(segments, *inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert needed(32 * BLOCK) < 2.2 * needed(16 * BLOCK)


@pytest.mark.parametrize(
    ("rows", "kv_heads"),
    [
        pytest.param(4, 2, id="heads divide the tensor axis"),
        pytest.param(8, 1, id="they do not", marks=pytest.mark.slow),
        pytest.param(3, 4, id="rows do not divide theirs", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_gives_the_outputs_of_one_device(rows, kv_heads):
    inputs = draw(rows, TIME, kv_heads)
    segments = jnp.asarray(np.arange(TIME) // 70 + np.arange(rows)[:, None], jnp.int32)
    expected = with_gradients(block_attention)(segments, *inputs)
    with jax.set_mesh(make_mesh(data=2, fsdp=2, tensor=2)):
        program = with_gradients(lambda *x: packed_attention("blocks", *x)).lower(segments, *inputs).compile()
        close(program(segments, *inputs), expected, 1e-6)
