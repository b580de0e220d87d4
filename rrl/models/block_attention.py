"""Attention over packed rows, one block of queries after another, against those key blocks that hold its segments.

A row holds several segments, and they may branch, so most of its causal blocks are masked out whole: here they are never
computed, neither forward nor backward, and no more than one block of scores exists at a time. The blocks are small and come one
after another, which is what a processor's caches want; accelerators have kernels of their own (`rrl.models.attention_backends`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rrl.models.products import sum_products

BLOCK = 64
"""Tokens of a block. Fewer skip more, but their products are too small; more fall out of the second cache."""

State = tuple[Array, ...]
Marks = tuple[Int[Array, "B T"], ...]
"""Segment ids, with the largest number on padding, and branches where there are some."""
Visible = tuple[Int[Array, "B blocks blocks"], Int[Array, "B blocks"]]
"""For each block of queries the blocks of keys that it looks at, and how many of the former those are."""


def block_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
    branches: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N H"]:
    """Each token attends to itself and earlier tokens of its own segment, wherever they are, of these to the trunk's (branch 0)
    and its own branch's; q must be scaled already.

    Segments may lie in any order. Only those whose numbers grow along the row, padding (0) last, skip all that can be
    skipped: a block of keys is left out where its range of numbers does not meet that of the queries. So it is with branches,
    where no key of the block is the trunk's.
    """
    batch, time, heads, width = q.shape
    kv_heads, block = k.shape[2], min(BLOCK, time)
    last = jnp.iinfo(jnp.int32).max
    if segment_ids is None:
        segment_ids = jnp.ones((batch, time), jnp.int32)
    ids = jnp.where(segment_ids == 0, last, segment_ids.astype(jnp.int32))
    more = -time % block
    q, k, v = (jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) for x in (q, k, v))
    ids = jnp.pad(ids, ((0, 0), (0, more)), constant_values=last)
    marks = (ids,) if branches is None else (ids, jnp.pad(branches, ((0, 0), (0, more))))
    grouped = q.reshape(batch, time + more, kv_heads, heads // kv_heads, width).transpose(0, 2, 1, 3, 4)
    out = _attend(grouped, k.swapaxes(1, 2), v.swapaxes(1, 2), marks, _visible(marks, block))
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)[:, :time]


def _visible(marks: Marks, block: int) -> Visible:
    """The blocks of keys in which each block of queries may have something to see, in their order, and how many they are."""

    def meets(
        x: Int[Array, "B T"], counts: Bool[Array, "B T"] | bool = True
    ) -> Bool[Array, "B blocks blocks"]:
        """Whether the ranges of the numbers that count meet, queries by keys."""
        limits = jnp.iinfo(jnp.int32)
        blocks = (
            jnp.where(counts, x, none).reshape(x.shape[0], -1, block) for none in (limits.max, limits.min)
        )
        low, high = (pick(part, axis=-1) for pick, part in zip((jnp.min, jnp.max), blocks, strict=True))
        return (low[:, None] <= high[:, :, None]) & (low[:, :, None] <= high[:, None])

    some = meets(marks[0])
    if len(marks) > 1:
        trunk = marks[1] == 0
        some &= trunk.reshape(*some.shape[:2], block).any(axis=-1)[:, None] | meets(marks[1], ~trunk)
    some &= jnp.tril(jnp.ones(some.shape[1:], bool))
    return jnp.argsort(~some, axis=-1, stable=True), some.sum(axis=-1)


def _cut(x: Array, row: Array, block: Array, size: int) -> Array:
    """Of [B, K, T, ...], or [B, T], a block of a row, without the axis of rows."""
    if x.ndim == 2:
        return jax.lax.dynamic_slice(x, (row, block * size), (1, size))[0]
    rest = x.shape[3:]
    return jax.lax.dynamic_slice(x, (row, 0, block * size, *[0] * len(rest)), (1, x.shape[1], size, *rest))[0]


def _put(x: Array, part: Array, row: Array, block: Array) -> Array:
    """`x` with a block of a row replaced."""
    return jax.lax.dynamic_update_slice(x, part[None], (row, 0, block * part.shape[1], *[0] * (x.ndim - 3)))


def _upright(x: Float[Array, "K t G H"]) -> Float[Array, "K H L"]:
    """Queries along the last axis, the L = G * t of a key head one after another: scores [keys, L] are then what both products
    with them read, turned for neither."""
    return x.transpose(0, 3, 2, 1).reshape(len(x), x.shape[3], -1)


def _lying(x: Float[Array, "K H L"], groups: int) -> Float[Array, "K t G H"]:
    """What `_upright` turned, as it was."""
    return x.reshape(*x.shape[:2], groups, -1).transpose(0, 3, 2, 1)


class _Queries(NamedTuple):
    """A block of queries, those of a key head beside one another."""

    upright: Float[Array, "K H L"]
    marks: tuple[Int[Array, "L"], ...]
    place: Int[Array, "L"]
    """Where each stands in the row."""


def _queries(q: Array, marks: Marks, row: Array, block: Array, size: int) -> _Queries:
    cut = _cut(q, row, block, size)
    groups = cut.shape[2]
    own = tuple(jnp.tile(_cut(x, row, block, size), groups) for x in marks)
    return _Queries(_upright(cut), own, block * size + jnp.tile(jnp.arange(size), groups))


def _scores(
    k: Float[Array, "K s H"], queries: _Queries, marks: Marks, row: Array, block: Array
) -> Float[Array, "K s L"]:
    """Of a block of keys with a block of queries, the smallest number where a query does not see the key."""
    size = k.shape[1]
    theirs = tuple(_cut(x, row, block, size)[:, None] for x in marks)
    seen = (queries.place >= block * size + jnp.arange(size)[:, None]) & (queries.marks[0] == theirs[0])
    if len(marks) > 1:
        seen &= (theirs[1] == 0) | (theirs[1] == queries.marks[1])
    scores = jnp.einsum("KSH,KHL->KSL", k, queries.upright, preferred_element_type=jnp.float32)
    return jnp.where(seen, scores, jnp.finfo(jnp.float32).min)


def _with_ones(x: Array) -> Array:
    """A last column of ones: a product with it sums the weights too."""
    return jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)


@jax.custom_vjp
def _attend(
    q: Float[Array, "B K T G H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    marks: Marks,
    visible: Visible,
) -> Float[Array, "B K T G H"]:
    """A running softmax over the blocks of keys (Milakov & Gimelshein 2018), whose backward pass recomputes the weights
    (Dao et al. 2022)."""
    return _forward(q, k, v, marks, visible)[0]


def _forward(q: Array, k: Array, v: Array, marks: Marks, visible: Visible) -> tuple[Array, tuple[Any, ...]]:
    order, count = visible
    number, groups = count.shape[1], q.shape[3]
    size, ones = q.shape[2] // number, _with_ones(v)

    def one_block(item: Array, state: State) -> State:
        (out, norm), row, at = state, item // number, item % number
        queries = _queries(q, marks, row, at, size)

        def add(place: Array, carry: State) -> State:
            block = order[row, at, place]
            peak, mixed = carry
            scores = _scores(_cut(k, row, block, size), queries, marks, row, block)
            higher = jnp.maximum(peak, scores.max(axis=1, keepdims=True))
            weights = jnp.exp(scores - higher).astype(v.dtype)
            theirs = _cut(ones, row, block, size).swapaxes(1, 2)
            added = jnp.einsum("KHS,KSL->KHL", theirs, weights, preferred_element_type=jnp.float32)
            return higher, mixed * jnp.exp(peak - higher) + added

        heads, _, length = queries.upright.shape
        start = (
            jnp.full((heads, 1, length), jnp.finfo(jnp.float32).min),
            jnp.zeros((heads, ones.shape[-1], length), jnp.float32),
        )
        peak, mixed = jax.lax.fori_loop(0, count[row, at], add, start)
        total = mixed[:, -1:]
        done = (mixed[:, :-1] / total).astype(out.dtype)
        return tuple(
            _put(x, _lying(part, groups), row, at) for x, part in ((out, done), (norm, peak + jnp.log(total)))
        )

    start = jnp.zeros_like(q), jnp.zeros((*q.shape[:-1], 1), jnp.float32)
    out, norm = jax.lax.fori_loop(0, count.size, one_block, start)
    return out, (q, k, v, marks, visible, out, norm)


def _backward(kept: tuple[Any, ...], grad: Array) -> tuple[Array, Array, Array, None, None]:
    q, k, v, marks, (order, count), out, norm = kept
    number, groups = count.shape[1], q.shape[3]
    size, ones = q.shape[2] // number, _with_ones(v).astype(jnp.float32)
    # A column beside the output's gradient subtracts the softmax's correction within the product with `ones`.
    wide = grad.astype(jnp.float32)
    wide = jnp.concatenate([wide, -sum_products(wide, out)], axis=-1)

    def one_block(item: Array, state: State) -> State:
        (dq, dk, dv), row, at = state, item // number, item % number
        queries = _queries(q, marks, row, at, size)
        wides, norms = (_upright(_cut(x, row, at, size)) for x in (wide, norm))
        asked = queries.upright.swapaxes(1, 2)
        grads = wides[:, :-1].swapaxes(1, 2).astype(grad.dtype)

        def add(place: Array, carry: State) -> State:
            block = order[row, at, place]
            dq, dk, dv = carry
            keys = _cut(k, row, block, size)
            weights = jnp.exp(_scores(keys, queries, marks, row, block) - norms)
            slope = jnp.einsum("KSH,KHL->KSL", _cut(ones, row, block, size), wides)
            slope = (weights * slope).astype(q.dtype)
            dq += jnp.einsum("KHS,KSL->KHL", keys.swapaxes(1, 2), slope, preferred_element_type=jnp.float32)
            summed = [
                _cut(total, row, block, size)
                + jnp.einsum("KSL,KLH->KSH", x, y, preferred_element_type=jnp.float32)
                for total, x, y in ((dk, slope, asked), (dv, weights.astype(grad.dtype), grads))
            ]
            return dq, _put(dk, summed[0], row, block), _put(dv, summed[1], row, block)

        start = jnp.zeros(queries.upright.shape, jnp.float32), dk, dv
        found, dk, dv = jax.lax.fori_loop(0, count[row, at], add, start)
        return _put(dq, _lying(found, groups).astype(dq.dtype), row, at), dk, dv

    start = jnp.zeros_like(q), jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dq, dk, dv = jax.lax.fori_loop(0, count.size, one_block, start)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None


_attend.defvjp(_forward, _backward)
