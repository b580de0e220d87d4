"""Initial parameters with induction heads: the two-layer circuit that looking up and copying in context are made of.

A head of the first layer attends to the token 1, 2 or 3 back and writes down what it is; heads of the second layer attend
to the places whose noted token is the current one, and copy what stands there (Olsson et al., 2022). Training a model of a
million parameters from noise takes some million tokens to find this circuit, and only then starts to read; here
training starts with a rough one and refines it. Shaping initial attention after what training ends with is mimetic
initialisation (Trockman and Kolter, 2023).
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from rrl.errors import UserError
from rrl.models.decoder import Decoder
from rrl.models.rope import frequencies

_FAST, _SLOW = 0.02, 0.01
"""RoPE frequencies above the one tell positions apart; those below the other hardly turn within a passage."""

_CONSTANT = 4.0
"""The component that all embeddings of a model without biases share, in standard deviations of the embeddings."""


def init_induction_heads(
    decoder: Decoder,
    *,
    seed: int = 0,
    offsets: Sequence[int] = (1, 2, 3),
    bias: float = 5.0,
    noted: float = 2.0,
    gain: float = 2.5,
    copied: float = 1.0,
) -> None:
    """Writes induction heads into the first two layers of a fresh decoder, in place.

    Head i of the first layer attends to the token offsets[i] back: its q and k biases are one vector, and q's is turned by
    that offset, so that RoPE makes their product largest there. (A model without biases reads them from a constant that
    is added to all embeddings.) It writes a random projection of that token to the residual stream. The first head of
    group j in the second layer looks for places where what head j mod len(offsets) wrote is that projection of the
    current token, and writes down what it finds there.

    Args:
        decoder: without norms of q and k (Qwen2, Llama); other layers, and heads without an offset, stay as they are.
        seed: of the random projections.
        offsets: how far back each head of the first layer looks.
        bias: length of each turned pair in the first layer's biases; squared in its attention scores.
        noted: size of what the first layer writes, in standard deviations of the embeddings.
        gain: scale of the second layer's queries and keys; squared in its attention scores.
        copied: size of what the second layer writes, like `noted`.

    Raises:
        UserError: norms of q and k, fewer than two layers, or more offsets than there is room for.
    """
    c, layers = decoder.config, decoder.layers
    most = min(c.heads, (c.hidden - (not c.qkv_bias)) // c.head_dim - 1)
    if c.qk_norm or c.layers < 2 or not 1 <= len(offsets) <= most:
        raise UserError(
            f"offsets={tuple(offsets)}: induction heads need a model without norms of q and k (qwen2, llama), two layers or "
            f"more, and 1 to {most} offsets here (a head each, and room in the hidden size); this one is "
            f"{c.model_type} with {c.layers} layers"
        )
    rng, group = np.random.default_rng(seed), c.heads // c.kv_heads
    p = {name: np.array(getattr(layers, name)[...], np.float32) for name in ("q", "k", "v", "o")}
    speed = frequencies(c)
    scale = float(np.std(np.asarray(decoder.embedding[...])))
    # What is read of a token, where each head writes it, and the constant do not overlap.
    width = (1 + len(offsets)) * c.head_dim
    basis = _orthonormal(rng, c.hidden, width + (not c.qkv_bias))
    read, *write = np.split(basis[:, :width], 1 + len(offsets), axis=1)
    if c.qkv_bias:
        p |= {name: np.array(getattr(layers, name)[...], np.float32) for name in ("q_bias", "k_bias")}
    else:
        _add_constant(decoder, basis[:, -1], _CONSTANT * scale)

    def always(name: str, head: int, value: np.ndarray) -> None:
        """Lets a head of the first layer have `value` as its q or k, whatever the token."""
        p[name][0, :, head] *= 0.1
        if c.qkv_bias:
            p[f"{name}_bias"][0, head] = value
        else:
            size = _CONSTANT / np.sqrt(1 + (_CONSTANT**2 - 1) / c.hidden)  # after the norm
            p[name][0, :, head] += np.outer(basis[:, -1], value / size)

    # First layer: where to look does not depend on the tokens.
    pairs = bias * (speed > _FAST)
    for head, offset in enumerate(offsets):
        angle = -offset * speed
        always("q", head, np.concatenate([np.cos(angle) * pairs, np.sin(angle) * pairs]))
        p["o"][0, head] = noted * scale * write[head].T
    for kv in range(-(-len(offsets) // group)):
        always("k", kv, np.concatenate([pairs, np.zeros_like(pairs)]))
        p["v"][0, :, kv] = read

    # Second layer: the current token as the first layer projects it, against what the first layer wrote.
    slow = np.tile(speed < _SLOW, 2)
    for kv in range(c.kv_heads):
        head = kv * group  # the others of its group stay free
        p["k"][1, :, kv] = gain * slow * write[kv % len(offsets)]
        p["q"][1, :, head] = gain * slow * read
        found = _orthonormal(rng, c.hidden, c.head_dim)
        p["v"][1, :, kv] = found
        p["o"][1, head] = copied * scale * found.T
    for name, value in p.items():
        getattr(layers, name)[...] = jnp.asarray(value, getattr(layers, name)[...].dtype)


def _add_constant(decoder: Decoder, direction: np.ndarray, size: float) -> None:
    """Gives all embeddings the same component along a unit vector."""
    table = np.asarray(decoder.embedding[...], np.float32)
    moved = table - np.outer(table @ direction, direction) + size * direction
    decoder.embedding[...] = jnp.asarray(moved, decoder.embedding[...].dtype)


def _orthonormal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """A random [rows, columns] matrix with orthonormal columns."""
    return np.linalg.qr(rng.normal(size=(rows, columns)))[0].astype(np.float32)
