"""Grouped-query attention, twice: over a packed batch with causal blocks, and over a key-value cache.

Softmax is in float32. Query heads N = K * G share K key heads; time and group are folded into one matrix
dimension, so that each (row, kv head) is one plain matrix product.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Groups = tuple[Int[Array, "G P/G"] | None, Int[Array, "G N"]]
"""Which of P entries read a cache together, and how many blocks of it each needs, most first; None: all do, in their order, as
many as the longest needs (N = 1)."""
SMALLEST_BLOCK = 32
MOST_BLOCKS = 8
"""Queries are handled in blocks in training; a block looks only at keys up to its own end, which saves nearly half of the
scores. Smaller blocks save more and stay in the processor's cache, more of them take longer to compile."""


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
    branches: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N H"]:
    """Each token attends to itself and earlier tokens of its own segment, of these to the trunk's (branch 0) and its own
    branch's; q must be scaled already."""
    batch, time, heads, width = q.shape
    group = heads // k.shape[2]
    outputs = []
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    grouped = q.reshape(batch, time, k.shape[2], group, width).transpose(0, 2, 1, 3, 4)
    block = max(SMALLEST_BLOCK, -(-time // MOST_BLOCKS))
    for start in range(0, time, block):
        end = min(start + block, time)
        mask = (jnp.arange(start, end)[:, None] >= jnp.arange(end))[None]
        if segment_ids is not None:
            mask = mask & (segment_ids[:, start:end, None] == segment_ids[:, None, :end])
        if branches is not None:
            mask = mask & on_its_way(branches[:, start:end], branches[:, :end])
        outputs.append(
            softmax_attention(grouped[:, :, start:end], keys[:, :, :end], values[:, :, :end], mask)
        )
    return jnp.concatenate(outputs, axis=2).transpose(0, 2, 1, 3, 4).reshape(q.shape)


def on_its_way(queries: Int[Array, "B t"], keys: Int[Array, "B s"]) -> Bool[Array, "B t s"]:
    """Whether a key's branch is the trunk or the query's own."""
    return (keys == 0)[:, None, :] | (queries[:, :, None] == keys[:, None, :])


@jax.custom_vjp
def softmax_attention(
    q: Float[Array, "B K T G H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "#B T S"],
) -> Float[Array, "B K T G H"]:
    """Attention whose backward pass recomputes the weights (Dao et al., 2022).

    A column of ones beside the values sums the weights within the matrix product, and one beside the output's gradient
    subtracts the softmax's correction: fewer passes over [T, S] than the plain form needs.
    """
    return _forward(q, k, v, mask)[0]


def _scores(q: Array, k: Array, mask: Array) -> Array:
    scores = jnp.einsum("BKTGH,BKSH->BKTGS", q, k, preferred_element_type=jnp.float32)
    return jnp.where(mask[:, None, :, None, :], scores, jnp.finfo(jnp.float32).min)


def _with(x: Array, column: Array) -> Array:
    return jnp.concatenate([x, column.astype(x.dtype)], axis=-1)


def _forward(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, tuple[Array, ...]]:
    scores = _scores(q, k, mask)
    peak = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak).astype(v.dtype)
    mixed = jnp.einsum(
        "BKTGS,BKSH->BKTGH", weights, _with(v, jnp.ones_like(v[..., :1])), preferred_element_type=jnp.float32
    )
    total = mixed[..., -1:]
    out = (mixed[..., :-1] / total).astype(v.dtype)
    return out, (q, k, v, mask, out, peak + jnp.log(total))


def _backward(kept: tuple[Array, ...], grad: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, mask, out, norm = kept
    weights = jnp.exp(_scores(q, k, mask) - norm)
    correction = (grad.astype(jnp.float32) * out).sum(axis=-1, keepdims=True)
    wide, ones = (
        _with(grad.astype(jnp.float32), -correction),
        _with(v, jnp.ones_like(v[..., :1])).astype(jnp.float32),
    )
    slope = (weights * jnp.einsum("BKTGH,BKSH->BKTGS", wide, ones)).astype(q.dtype)
    dv = jnp.einsum(
        "BKTGS,BKTGH->BKSH", weights.astype(grad.dtype), grad, preferred_element_type=jnp.float32
    ).astype(v.dtype)
    dq = jnp.einsum("BKTGS,BKSH->BKTGH", slope, k)
    dk = jnp.einsum("BKTGS,BKTGH->BKSH", slope, q, preferred_element_type=jnp.float32).astype(k.dtype)
    return dq, dk, dv, None


softmax_attention.defvjp(_forward, _backward)


def cache_attention(
    q: Float[Array, "P T N H"],
    k: Float[Array, "L blocks R K slot H"],
    v: Float[Array, "L blocks R K slot H"],
    layer: Int[Array, ""],
    positions: Int[Array, "P T"],
    rows: Int[Array, "P"] | None,
    groups: Groups,
    readers: Sequence[int],
    *,
    slots_last: bool = False,
) -> Float[Array, "P T N H"]:
    """Each query attends to a layer's slots up to its own position; q must be scaled already, k is [..., H, slot] with
    `slots_last`.

    Reads blocks one after another, with a running softmax (Milakov & Gimelshein 2018), a group of the P entries at a time
    (`rrl.models.cache.KVCache.groups`): at first all `readers[0]` of it; once no more than `readers[1]` need another block,
    so many, and so on. A block beyond a query's position adds exact zeros, so the result does not depend on how many blocks
    are read: a row's bits are the same whatever its neighbours are, if they are for each number of readers.
    """
    time, heads, width = q.shape[1:]
    kv_heads, slots = v.shape[3:5]
    products = "PKTGH,PKHS->PKTGS" if slots_last else "PKTGH,PKSH->PKTGS"
    grouped = jnp.swapaxes(q.reshape(-1, time, kv_heads, heads // kv_heads, width), 1, 2)
    order, needed = groups

    def of_group(entries: Array | None, needed: Array) -> Float[Array, "P/G K T G H"]:
        sizes: tuple[int, ...]
        if entries is None:
            queries, until, held, sizes = grouped, positions, rows, (len(q),)
        else:
            held = entries if rows is None else rows[entries]
            queries, until, sizes = grouped[entries], positions[entries], tuple(readers)

        def one_block(state: tuple[Array, ...], count: int) -> tuple[Array, ...]:
            index, peak, total, mixed = state
            which = slice(None) if held is None else held[:count]
            keys, values = (part[layer, index, which].astype(q.dtype) for part in (k, v))
            scores = jnp.einsum(products, queries[:count], keys, preferred_element_type=jnp.float32)
            seen = index * slots + jnp.arange(slots) <= until[:count, :, None]
            scores = jnp.where(seen[:, None, :, None, :], scores, jnp.finfo(jnp.float32).min)
            higher = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
            weights, shrink = jnp.exp(scores - higher), jnp.exp(peak - higher)
            added = jnp.einsum(
                "PKTGS,PKSH->PKTGH", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
            )
            total = total * shrink + weights.sum(axis=-1, keepdims=True)
            return index + 1, higher, total, mixed * shrink + added

        shape = queries.shape[:-1]
        peak = jnp.full((*shape, 1), jnp.finfo(jnp.float32).min)
        sums = jnp.zeros((*shape, 1), jnp.float32), jnp.zeros((*shape, width), jnp.float32)
        index, state = jnp.int32(0), (peak, *sums)
        for count, fewer in zip(sizes, (*sizes[1:], 0), strict=True):
            index, *some = jax.lax.while_loop(
                lambda state, fewer=fewer: needed[fewer] > state[0],
                functools.partial(one_block, count=count),
                (index, *(part[:count] for part in state)),
            )
            state = tuple(jnp.concatenate([new, old[count:]]) for new, old in zip(some, state, strict=True))
        _, total, mixed = state
        return (mixed / jnp.maximum(total, 1.0)).astype(q.dtype)

    if order is None:
        out = of_group(None, needed[0])
    elif len(order) == 1:
        out = of_group(order[0], needed[0])[jnp.argsort(order[0])]
    else:
        out = jax.lax.map(lambda group: of_group(*group), (order, needed)).reshape(grouped.shape)
        out = out[jnp.argsort(order.ravel())]
    return jnp.swapaxes(out, 1, 2).reshape(q.shape)
