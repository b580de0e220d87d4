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
    k: Float[Array, "P S K H"],
    v: Float[Array, "P S K H"],
    positions: Int[Array, "P T"],
) -> Float[Array, "P T N H"]:
    """Each query attends to the slots up to its own position; q must be scaled already."""
    return attend(q, k, v, jnp.arange(k.shape[1]) <= positions[..., None])


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
