"""Grouped-query attention, twice: over a packed batch with causal blocks, and over a key-value cache.

Softmax is in float32. Query heads N = K * G share K key heads; time and group are folded into one matrix
dimension, so that each (row, kv head) is one plain matrix product.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

QUERY_BLOCK = 128
"""Queries handled at once in training; a block looks only at keys up to its own end, which saves nearly half."""


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N H"]:
    """Each token attends to itself and earlier tokens of its own segment; q must be scaled already."""
    outputs = []
    for start in range(0, q.shape[1], QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, q.shape[1])
        mask = (jnp.arange(start, end)[:, None] >= jnp.arange(end))[None]
        if segment_ids is not None:
            mask = mask & (segment_ids[:, start:end, None] == segment_ids[:, None, :end])
        outputs.append(attend(q[:, start:end], k[:, :end], v[:, :end], mask))
    return jnp.concatenate(outputs, axis=1)


def cache_attention(
    q: Float[Array, "P T N H"],
    k: Float[Array, "blocks R slot K H"],
    v: Float[Array, "blocks R slot K H"],
    positions: Int[Array, "P T"],
    blocks: Int[Array, ""],
    rows: Int[Array, "P"] | None = None,
) -> Float[Array, "P T N H"]:
    """Each query attends to the slots up to its own position; q must be scaled already.

    Reads the first `blocks` blocks, one after another, with a running softmax (Milakov & Gimelshein 2018). A block
    beyond a query's position adds exact zeros, so the result does not depend on how many blocks are read: a row's bits
    are the same whatever its neighbours are.
    """
    batch, time, heads, width = q.shape
    slots, kv_heads = k.shape[2:4]
    grouped = q.reshape(batch, time, kv_heads, heads // kv_heads, width)

    def one_block(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, mixed = carry
        keys, values = (
            (part[index] if rows is None else part[index, rows]).astype(q.dtype) for part in (k, v)
        )
        scores = jnp.einsum("BTKGH,BSKH->BKTGS", grouped, keys, preferred_element_type=jnp.float32)
        seen = index * slots + jnp.arange(slots) <= positions[..., None]
        scores = jnp.where(seen[:, None, :, None, :], scores, jnp.finfo(jnp.float32).min)
        higher = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
        weights, shrink = jnp.exp(scores - higher), jnp.exp(peak - higher)
        added = jnp.einsum(
            "BKTGS,BSKH->BKTGH", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        return higher, total * shrink + weights.sum(axis=-1, keepdims=True), mixed * shrink + added

    shape = (batch, kv_heads, time, heads // kv_heads)
    start = (
        jnp.full((*shape, 1), jnp.finfo(jnp.float32).min),
        jnp.zeros((*shape, 1), jnp.float32),
        jnp.zeros((*shape, width), jnp.float32),
    )
    _, total, mixed = jax.lax.fori_loop(0, blocks, one_block, start)
    return jnp.moveaxis(mixed / total, 1, 2).reshape(q.shape).astype(q.dtype)


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "#B T S"],
) -> Float[Array, "B T N H"]:
    """Plain attention under a mask; every query must see at least one key."""
    batch, time, heads, width = q.shape
    grouped = q.reshape(batch, time, k.shape[2], heads // k.shape[2], width)
    scores = jnp.einsum("BTKGH,BSKH->BKTGS", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, :, None, :], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("BKTGS,BSKH->BTKGH", weights, v).reshape(q.shape)
