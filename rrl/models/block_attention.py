"""Block-sparse attention over packed rows for CPUs: skips pairs of query and key blocks without a common segment or branch.

A row holds several segments, possibly with branches, so the mask excludes most of its causal blocks completely. This kernel
computes them neither forward nor backward, and only one block of scores exists at a time. Small blocks, one after another,
suit a CPU's caches; accelerators use other kernels (`rrl.models.attention_backends`). Read `block_attention` first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rrl.models.products import sum_products

BLOCK = 64
"""Tokens per block. Smaller blocks skip more keys, but their matrix products are too small to be fast. Larger blocks do not fit
in the L2 cache."""

State = tuple[Array, ...]


class Labels(NamedTuple):
    """What decides which keys a query may see; None if it does not matter.

    For one pair of blocks, the arrays are [s, 1] for the keys and [L] for the queries.
    """

    segment_ids: Int[Array, "B T"]
    """The segment id of padding is the largest int32."""
    branches: Int[Array, "B T"] | None
    positions: Int[Array, "B T"] | None
    """Position of each token in its sequence, if there is a window."""
    window: Int[Array, ""] | None
    """Number of positions that a query sees at most, its own included."""

    def map(self, function: Callable[[Array], Array]) -> "Labels":
        """Applies a function to all arrays except the window."""
        branches, positions = (
            part if part is None else function(part) for part in (self.branches, self.positions)
        )
        return Labels(function(self.segment_ids), branches, positions, self.window)


VisibleBlocks = tuple[Int[Array, "B blocks blocks"], Int[Array, "B blocks"]]
"""(order, count): for each query block, `order` lists the key blocks, visible ones first; `count` is how many are visible."""


def block_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
    branches: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    window: Int[Array, ""] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of a packed batch; q, k, v, segments and branches as for `rrl.models.attention.causal_attention`.

    With `window`, a token attends only to tokens less than `window` positions back.

    The result is correct for segment ids in any order. The most blocks are skipped if ids increase along the row and padding
    (0) comes last: a key block is skipped if its range of ids does not overlap with the query block's range. With branches,
    it is also skipped if it has no trunk token and its range of branches does not overlap.
    """
    batch, time, heads, width = q.shape
    kv_heads, block = k.shape[2], min(BLOCK, time)
    last = jnp.iinfo(jnp.int32).max
    if segment_ids is None:
        segment_ids = jnp.ones((batch, time), jnp.int32)
    ids = jnp.where(segment_ids == 0, last, segment_ids.astype(jnp.int32))
    padding = -time % block
    q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    ids = jnp.pad(ids, ((0, 0), (0, padding)), constant_values=last)
    if branches is not None:
        branches = jnp.pad(branches, ((0, 0), (0, padding)))
    if positions is not None:  # padding with 0 would make the first blocks visible to the last one
        positions = jnp.pad(positions, ((0, 0), (0, padding)), mode="edge")
    labels = Labels(ids, branches, positions, window)
    grouped = q.reshape(batch, time + padding, kv_heads, heads // kv_heads, width).transpose(0, 2, 1, 3, 4)
    out = _attend(grouped, k.swapaxes(1, 2), v.swapaxes(1, 2), labels, _visible_blocks(labels, block))
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)[:, :time]


def _visible_blocks(labels: Labels, block: int) -> VisibleBlocks:
    """Finds the key blocks that may hold a visible key for each query block."""

    def overlaps(
        x: Int[Array, "B T"], included: Bool[Array, "B T"] | bool = True
    ) -> Bool[Array, "B blocks blocks"]:
        """[query block, key block]: whether the ranges of `x` in both blocks overlap; only tokens in `included` count."""
        limits = jnp.iinfo(jnp.int32)
        blocks = (
            jnp.where(included, x, excluded).reshape(x.shape[0], -1, block)
            for excluded in (limits.max, limits.min)
        )
        low, high = (reduce(part, axis=-1) for reduce, part in zip((jnp.min, jnp.max), blocks, strict=True))
        return (low[:, None] <= high[:, :, None]) & (low[:, :, None] <= high[:, None])

    mask = overlaps(labels.segment_ids)
    if labels.branches is not None:
        trunk = labels.branches == 0
        mask &= trunk.reshape(*mask.shape[:2], block).any(axis=-1)[:, None] | overlaps(
            labels.branches, ~trunk
        )
    if labels.positions is not None and labels.window is not None:
        positions = labels.positions.reshape(*mask.shape[:2], block)
        nearest = positions.min(axis=-1)[:, :, None] - positions.max(axis=-1)[:, None]
        mask &= nearest < labels.window
    mask &= jnp.tril(jnp.ones(mask.shape[1:], bool))
    return jnp.argsort(~mask, axis=-1, stable=True), mask.sum(axis=-1)


def _slice_block(x: Array, row: Array, block: Array, size: int) -> Array:
    """One block of one row of [B, K, T, ...] or [B, T], without the row axis."""
    if x.ndim == 2:
        return jax.lax.dynamic_slice(x, (row, block * size), (1, size))[0]
    rest = x.shape[3:]
    return jax.lax.dynamic_slice(x, (row, 0, block * size, *[0] * len(rest)), (1, x.shape[1], size, *rest))[0]


def _update_block(x: Array, part: Array, row: Array, block: Array) -> Array:
    """`x` with one block of one row replaced."""
    return jax.lax.dynamic_update_slice(x, part[None], (row, 0, block * part.shape[1], *[0] * (x.ndim - 3)))


def _queries_last(x: Float[Array, "K t G H"]) -> Float[Array, "K H L"]:
    """Moves the L = G * t queries of each key head to the last axis (in this file L is not the number of layers).

    The matrix products with the scores [keys, L] then read the queries without a transpose.
    """
    return x.transpose(0, 3, 2, 1).reshape(len(x), x.shape[3], -1)


def _queries_first(x: Float[Array, "K H L"], groups: int) -> Float[Array, "K t G H"]:
    """The inverse of `_queries_last`."""
    return x.reshape(*x.shape[:2], groups, -1).transpose(0, 3, 2, 1)


class _Queries(NamedTuple):
    """A block of queries, in the layout of `_queries_last`."""

    q: Float[Array, "K H L"]
    labels: Labels
    column: Int[Array, "L"]
    """Column of each query in the row."""


def _query_block(q: Array, labels: Labels, row: Array, block: Array, size: int) -> _Queries:
    part = _slice_block(q, row, block, size)
    groups = part.shape[2]
    query_labels = labels.map(lambda x: jnp.tile(_slice_block(x, row, block, size), groups))
    return _Queries(_queries_last(part), query_labels, block * size + jnp.tile(jnp.arange(size), groups))


def _scores(
    k: Float[Array, "K s H"], queries: _Queries, labels: Labels, row: Array, block: Array
) -> Float[Array, "K s L"]:
    """Scores of a key block with a query block; the lowest float32 if the query may not see the key."""
    size = k.shape[1]
    keys = labels.map(lambda x: _slice_block(x, row, block, size)[:, None])
    same_segment = queries.labels.segment_ids == keys.segment_ids
    mask = (queries.column >= block * size + jnp.arange(size)[:, None]) & same_segment
    if keys.branches is not None:
        mask &= (keys.branches == 0) | (keys.branches == queries.labels.branches)
    if keys.window is not None and keys.positions is not None and queries.labels.positions is not None:
        mask &= queries.labels.positions - keys.positions < keys.window
    scores = jnp.einsum("KSH,KHL->KSL", k, queries.q, preferred_element_type=jnp.float32)
    return jnp.where(mask, scores, jnp.finfo(jnp.float32).min)


def _append_ones(x: Array) -> Array:
    """Appends a column of ones, so that a product with the attention weights sums them too."""
    return jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)


@jax.custom_vjp
def _attend(
    q: Float[Array, "B K T G H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    labels: Labels,
    visible: VisibleBlocks,
) -> Float[Array, "B K T G H"]:
    """Attention with a running softmax over key blocks (Milakov & Gimelshein 2018); the backward pass recomputes the weights
    (Dao et al. 2022)."""
    return _forward(q, k, v, labels, visible)[0]


def _forward(
    q: Array, k: Array, v: Array, labels: Labels, visible: VisibleBlocks
) -> tuple[Array, tuple[Any, ...]]:
    order, count = visible
    blocks_per_row, groups = count.shape[1], q.shape[3]
    size, extended_v = q.shape[2] // blocks_per_row, _append_ones(v)

    def one_query_block(item: Array, state: State) -> State:
        (out, logsumexp), row, query_block = state, item // blocks_per_row, item % blocks_per_row
        queries = _query_block(q, labels, row, query_block, size)

        def add_key_block(rank: Array, carry: State) -> State:
            block = order[row, query_block, rank]
            peak, weighted_sum = carry
            scores = _scores(_slice_block(k, row, block, size), queries, labels, row, block)
            higher = jnp.maximum(peak, scores.max(axis=1, keepdims=True))
            weights = jnp.exp(scores - higher).astype(v.dtype)
            values = _slice_block(extended_v, row, block, size).swapaxes(1, 2)
            added = jnp.einsum("KHS,KSL->KHL", values, weights, preferred_element_type=jnp.float32)
            return higher, weighted_sum * jnp.exp(peak - higher) + added

        heads, _, length = queries.q.shape
        start = (
            jnp.full((heads, 1, length), jnp.finfo(jnp.float32).min),
            jnp.zeros((heads, extended_v.shape[-1], length), jnp.float32),
        )
        peak, weighted_sum = jax.lax.fori_loop(0, count[row, query_block], add_key_block, start)
        total = weighted_sum[:, -1:]
        attended = (weighted_sum[:, :-1] / total).astype(out.dtype)
        return tuple(
            _update_block(x, _queries_first(part, groups), row, query_block)
            for x, part in ((out, attended), (logsumexp, peak + jnp.log(total)))
        )

    start = jnp.zeros_like(q), jnp.zeros((*q.shape[:-1], 1), jnp.float32)
    out, logsumexp = jax.lax.fori_loop(0, count.size, one_query_block, start)
    return out, (q, k, v, labels, visible, out, logsumexp)


def _backward(residuals: tuple[Any, ...], grad: Array) -> tuple[Array, Array, Array, None, None]:
    q, k, v, labels, (order, count), out, logsumexp = residuals
    blocks_per_row, groups = count.shape[1], q.shape[3]
    size, extended_v = q.shape[2] // blocks_per_row, _append_ones(v).astype(jnp.float32)
    # The scores' gradient is weights * (dO V^T - D) with D = rowsum(dO * O). The column -D appended to dO makes the product with
    # the extended values give dO V^T - D.
    grad32 = grad.astype(jnp.float32)
    extended_grad = jnp.concatenate([grad32, -sum_products(grad32, out)], axis=-1)

    def one_query_block(item: Array, state: State) -> State:
        (dq, dk, dv), row, query_block = state, item // blocks_per_row, item % blocks_per_row
        queries = _query_block(q, labels, row, query_block, size)
        extended_grads, logsumexps = (
            _queries_last(_slice_block(x, row, query_block, size)) for x in (extended_grad, logsumexp)
        )
        q_block = queries.q.swapaxes(1, 2)
        grads = extended_grads[:, :-1].swapaxes(1, 2).astype(grad.dtype)

        def add_key_block(rank: Array, carry: State) -> State:
            block = order[row, query_block, rank]
            dq, dk, dv = carry
            keys = _slice_block(k, row, block, size)
            weights = jnp.exp(_scores(keys, queries, labels, row, block) - logsumexps)
            score_grad = jnp.einsum(
                "KSH,KHL->KSL", _slice_block(extended_v, row, block, size), extended_grads
            )
            score_grad = (weights * score_grad).astype(q.dtype)
            dq += jnp.einsum(
                "KHS,KSL->KHL", keys.swapaxes(1, 2), score_grad, preferred_element_type=jnp.float32
            )
            summed = [
                _slice_block(total, row, block, size)
                + jnp.einsum("KSL,KLH->KSH", x, y, preferred_element_type=jnp.float32)
                for total, x, y in ((dk, score_grad, q_block), (dv, weights.astype(grad.dtype), grads))
            ]
            return dq, _update_block(dk, summed[0], row, block), _update_block(dv, summed[1], row, block)

        start = jnp.zeros(queries.q.shape, jnp.float32), dk, dv
        dq_block, dk, dv = jax.lax.fori_loop(0, count[row, query_block], add_key_block, start)
        return _update_block(dq, _queries_first(dq_block, groups).astype(dq.dtype), row, query_block), dk, dv

    start = jnp.zeros_like(q), jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dq, dk, dv = jax.lax.fori_loop(0, count.size, one_query_block, start)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None


_attend.defvjp(_forward, _backward)
