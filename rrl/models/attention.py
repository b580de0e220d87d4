"""Grouped-query attention in XLA: `causal_attention` over a packed batch, and `cache_attention` over a key-value cache.

Softmax is in float32. N = K * G query heads share K key heads. Time and group are folded into one matrix dimension, so that
each (row, kv head) is one matrix product.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rrl.models.config import NO_WINDOW

MIN_QUERY_BLOCK = 32
MAX_QUERY_BLOCKS = 8
"""Training processes queries in blocks. A block computes scores only for keys up to its own end, which saves nearly half of
them. Smaller blocks save more and fit in the CPU's cache; more blocks take longer to compile."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["order", "needed"], meta_fields=["batch_sizes"]
)
@dataclasses.dataclass(frozen=True)
class ReadGroups:
    """Groups of E entries that read the cache together. An entry is the new tokens of one sequence, or a chunk of them."""

    order: Int[Array, "groups E"] | None
    """Indices of each group's entries. None: all P entries form one group in the order of the batch."""
    needed: Int[Array, "groups E"]
    """Number of blocks that each of them reads, in descending order; without `order` the largest number, [1, 1]."""
    batch_sizes: tuple[int, ...] = ()
    """Allowed numbers of entries that read a block together, in descending order. Each is the batch size of a matrix product."""


class Window(NamedTuple):
    """The sliding window of one layer. Layers with and without one are computed by the same program."""

    width: int
    """Number of tokens that a token of a sliding layer attends to, itself included."""
    slides: Bool[Array, ""]
    """Whether this layer has the window."""
    positions: Int[Array, "B T"]
    """Position of each token in its sequence. The window counts positions, so that it follows a branch of a prefix tree."""

    @property
    def size(self) -> Int[Array, ""]:
        """Number of tokens that a token of this layer attends to at most."""
        return jnp.where(self.slides, self.width, NO_WINDOW)


class Ring(NamedTuple):
    """Where a cache stores one layer of a model with sliding windows: in consecutive blocks, which are used as a ring.

    Position p is stored in slot p % (number of slots of all these blocks), and overwrites the position that was there. The ring
    is large enough that a query's window is never overwritten (`rrl.models.cache.layer_blocks`).
    """

    first: Int[Array, ""]
    """Its first block."""
    blocks: Int[Array, ""]
    """Number of its blocks."""
    window: Int[Array, ""]
    """Number of tokens that a token of this layer attends to at most, itself included."""

    def visible(
        self, slot: Int[Array, "s"], positions: Int[Array, "E T 1"], block: int
    ) -> Bool[Array, "E T s"]:
        """Whether a query at each position attends to each slot of the ring. `block` is the number of slots of a block."""
        size = self.blocks * block
        back = positions % size - slot
        back = jnp.where(back < 0, back + size, back)  # the slot holds the position that is so far back
        return back < jnp.minimum(self.window, positions + 1)


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
    branches: Int[Array, "B T"] | None = None,
    window: Window | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of a packed batch.

    A segment is one sequence, or a prefix tree of several sequences that share tokens: a trunk (branch 0) and branches 1, 2,
    ... Each token attends to itself and to the earlier tokens of its segment that are in the trunk or in its own branch.

    Args:
        q: queries, already scaled.
        k: keys.
        v: values.
        segment_ids: segment of each token; None: each row is one segment.
        branches: branch of each token (`rrl.rl.batch.Batch.branches`); None: all tokens are in the trunk.
        window: of this layer; None: a token attends to all these tokens.
    """
    batch, time, heads, width = q.shape
    group = heads // k.shape[2]
    outputs = []
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    grouped = q.reshape(batch, time, k.shape[2], group, width).transpose(0, 2, 1, 3, 4)
    block = max(MIN_QUERY_BLOCK, -(-time // MAX_QUERY_BLOCKS))
    for start in range(0, time, block):
        end = min(start + block, time)
        mask = (jnp.arange(start, end)[:, None] >= jnp.arange(end))[None]
        if segment_ids is not None:
            mask = mask & (segment_ids[:, start:end, None] == segment_ids[:, None, :end])
        if branches is not None:
            mask = mask & visible(branches[:, start:end], branches[:, :end])
        if window is not None:
            mask = mask & in_window(window, window.positions[:, start:end], window.positions[:, :end])
        outputs.append(
            softmax_attention(grouped[:, :, start:end], keys[:, :, :end], values[:, :, :end], mask)
        )
    return jnp.concatenate(outputs, axis=2).transpose(0, 2, 1, 3, 4).reshape(q.shape)


def visible(query_branches: Int[Array, "B t"], key_branches: Int[Array, "B s"]) -> Bool[Array, "B t s"]:
    """Mask of the keys that are in the trunk (branch 0) or in the query's own branch."""
    return (key_branches == 0)[:, None, :] | (query_branches[:, :, None] == key_branches[:, None, :])


def in_window(
    window: Window, query_positions: Int[Array, "B t"], key_positions: Int[Array, "B s"]
) -> Bool[Array, "B t s"]:
    """Mask of the keys that are not too far back. It does not exclude later keys."""
    return query_positions[:, :, None] - key_positions[:, None, :] < window.size


@jax.custom_vjp
def softmax_attention(
    q: Float[Array, "B K T G H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "#B T S"],
) -> Float[Array, "B K T G H"]:
    """Softmax attention whose backward pass recomputes the weights (Dao et al., 2022).

    Forward: the values get a column of ones, so that the product with the weights also gives the sum of the weights. Backward:
    the scores' gradient is weights * (dO V^T - D) with D = rowsum(dO * O), and dO gets the column -D, so that the product with
    the same extended values gives dO V^T - D. Each extra column saves a pass over the [T, S] scores.
    """
    return _forward(q, k, v, mask)[0]


def _scores(q: Array, k: Array, mask: Array) -> Array:
    scores = jnp.einsum("BKTGH,BKSH->BKTGS", q, k, preferred_element_type=jnp.float32)
    return jnp.where(mask[:, None, :, None, :], scores, jnp.finfo(jnp.float32).min)


def _append_column(x: Array, column: Array) -> Array:
    return jnp.concatenate([x, column.astype(x.dtype)], axis=-1)


def _forward(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, tuple[Array, ...]]:
    scores = _scores(q, k, mask)
    peak = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak).astype(v.dtype)
    weighted_sum = jnp.einsum(
        "BKTGS,BKSH->BKTGH",
        weights,
        _append_column(v, jnp.ones_like(v[..., :1])),
        preferred_element_type=jnp.float32,
    )
    total = weighted_sum[..., -1:]
    out = (weighted_sum[..., :-1] / total).astype(v.dtype)
    return out, (q, k, v, mask, out, peak + jnp.log(total))


def _backward(residuals: tuple[Array, ...], grad: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, mask, out, logsumexp = residuals
    weights = jnp.exp(_scores(q, k, mask) - logsumexp)
    correction = (grad.astype(jnp.float32) * out).sum(axis=-1, keepdims=True)
    extended_grad, extended_v = (
        _append_column(grad.astype(jnp.float32), -correction),
        _append_column(v, jnp.ones_like(v[..., :1])).astype(jnp.float32),
    )
    score_grad = (weights * jnp.einsum("BKTGH,BKSH->BKTGS", extended_grad, extended_v)).astype(q.dtype)
    dv = jnp.einsum(
        "BKTGS,BKTGH->BKSH", weights.astype(grad.dtype), grad, preferred_element_type=jnp.float32
    ).astype(v.dtype)
    dq = jnp.einsum("BKTGS,BKSH->BKTGH", score_grad, k)
    dk = jnp.einsum("BKTGS,BKTGH->BKSH", score_grad, q, preferred_element_type=jnp.float32).astype(k.dtype)
    return dq, dk, dv, None


softmax_attention.defvjp(_forward, _backward)


def cache_attention(
    q: Float[Array, "P T N H"],
    keys_values: tuple[Float[Array, "L blocks R K slot H"], Float[Array, "L blocks R K slot H"]],
    layer: Int[Array, ""],
    positions: Int[Array, "P T"],
    rows: Int[Array, "P"] | None,
    groups: ReadGroups,
    *,
    slots_last: bool = False,
    ring: Ring | None = None,
) -> Float[Array, "P T N H"]:
    """Attention over one layer of a cache: each query attends to the positions up to its own.

    Reads the cache block by block with a running softmax (Milakov & Gimelshein 2018), for one group of entries at a time
    (`rrl.models.cache.KVCache.read_groups`). All `batch_sizes[0]` entries of a group read the first blocks together. As soon as
    at most `batch_sizes[1]` entries need further blocks, only these continue, and so on. A block beyond a query's position adds
    exact zeros, so the result does not depend on how many blocks are read. Hence an entry's result is bitwise independent of the
    other entries, if the matrix products of all `batch_sizes` are bitwise equal.

    Args:
        q: queries, already scaled.
        keys_values: keys and values of all layers; with `slots_last` the keys are [L, blocks, R, K, H, slot]. With `ring`, L is
            1 and the blocks are those of all layers.
        layer: which layer to read.
        positions: position of each query.
        rows: cache row of each of the P entries (`ReadGroups`); None: entry p reads row p.
        groups: from `KVCache.read_groups`.
        slots_last: layout of the keys.
        ring: blocks and window of the layer, if the model has sliding windows. None: the layer holds all positions, each in the
            slot of its number, and has no window.
    """
    time, heads, width = q.shape[1:]
    kv_heads = keys_values[1].shape[3]
    grouped = jnp.swapaxes(q.reshape(-1, time, kv_heads, heads // kv_heads, width), 1, 2)

    def attend_group(entries: Array | None, needed: Array) -> Float[Array, "E K T G H"]:
        batch_sizes: tuple[int, ...]
        if entries is None:
            queries, batch_sizes = _GroupQueries(grouped, positions, rows), (len(q),)
        else:
            cache_rows = entries if rows is None else rows[entries]
            queries, batch_sizes = (
                _GroupQueries(grouped[entries], positions[entries], cache_rows),
                groups.batch_sizes,
            )
        read = functools.partial(_attend_block, queries, keys_values, layer, slots_last=slots_last, ring=ring)
        return _read_blocks(
            read, queries.q, needed if ring is None else jnp.minimum(needed, ring.blocks), batch_sizes
        )

    if groups.order is None:
        out = attend_group(None, groups.needed[0])
    elif len(groups.order) == 1:
        out = attend_group(groups.order[0], groups.needed[0])[jnp.argsort(groups.order[0])]
    else:
        out = jax.lax.map(lambda group: attend_group(*group), (groups.order, groups.needed)).reshape(
            grouped.shape
        )
        out = out[jnp.argsort(groups.order.ravel())]
    return jnp.swapaxes(out, 1, 2).reshape(q.shape)


class _GroupQueries(NamedTuple):
    """The queries of a group of entries that read the cache together."""

    q: Float[Array, "E K T G H"]
    positions: Int[Array, "E T"]
    """Last position that each query attends to: its own."""
    rows: Int[Array, "E"] | None
    """Cache row of each entry; None: entry e reads row e."""


RunningSoftmax = tuple[Array, Array, Array, Array]
"""(next block, largest score so far, sum of weights, weighted sum of values); the last three are per query and head."""


def _read_blocks(
    read: Callable[..., RunningSoftmax],
    q: Float[Array, "E K T G H"],
    needed: Int[Array, "E"],
    batch_sizes: Sequence[int],
) -> Float[Array, "E K T G H"]:
    """Attend to all blocks that a group needs. `read` is `_attend_block` of the group's queries `q`."""
    shape, width = q.shape[:-1], q.shape[-1]
    peak = jnp.full((*shape, 1), jnp.finfo(jnp.float32).min)
    sums = jnp.zeros((*shape, 1), jnp.float32), jnp.zeros((*shape, width), jnp.float32)
    index, state = jnp.int32(0), (peak, *sums)
    # Entries are sorted by need. While needed[next_count] > index, more than next_count entries still need block `index`.
    for count, next_count in zip(batch_sizes, (*batch_sizes[1:], 0), strict=True):
        index, *updated = jax.lax.while_loop(
            lambda state, next_count=next_count: needed[next_count] > state[0],
            functools.partial(read, count=count),
            (index, *(part[:count] for part in state)),
        )
        state = tuple(jnp.concatenate([new, old[count:]]) for new, old in zip(updated, state, strict=True))
    _, total, weighted_sum = state
    # The largest weight is 1, so the total is at least 1. If no block was read, the total and the output are 0.
    return (weighted_sum / jnp.maximum(total, 1.0)).astype(q.dtype)


def _attend_block(
    queries: _GroupQueries,
    keys_values: tuple[Array, Array],
    layer: Int[Array, ""],
    state: RunningSoftmax,
    count: int,
    *,
    slots_last: bool,
    ring: Ring | None,
) -> RunningSoftmax:
    """Attend to the next block of the first `count` entries of a group."""
    index, peak, total, weighted_sum = state
    slots = keys_values[1].shape[4]
    which = slice(None) if queries.rows is None else queries.rows[:count]
    place = (layer, index) if ring is None else (0, ring.first + index)
    keys, values = (part[*place, which].astype(queries.q.dtype) for part in keys_values)
    score_axes = "PKTGH,PKHS->PKTGS" if slots_last else "PKTGH,PKSH->PKTGS"
    scores = jnp.einsum(score_axes, queries.q[:count], keys, preferred_element_type=jnp.float32)
    slot = index * slots + jnp.arange(slots)
    mask = (
        slot <= queries.positions[:count, :, None]
        if ring is None
        else ring.visible(slot, queries.positions[:count, :, None], slots)
    )
    scores = jnp.where(mask[:, None, :, None, :], scores, jnp.finfo(jnp.float32).min)
    higher = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
    weights, shrink = jnp.exp(scores - higher), jnp.exp(peak - higher)
    if ring is not None:
        # In a block outside the window, all scores are the mask's, and so is the peak: exp(0) = 1.
        weights = jnp.where(mask[:, None, :, None, :], weights, 0.0)
    added = jnp.einsum(
        "PKTGS,PKSH->PKTGH", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    total = total * shrink + weights.sum(axis=-1, keepdims=True)
    return index + 1, higher, total, weighted_sum * shrink + added
