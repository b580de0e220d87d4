"""Initial parameters with induction heads, the two-layer circuit for looking up and copying tokens of the context.

A head of the first layer attends to the token 1, 2 or 3 back and writes its identity to the residual stream. A head of the
second layer attends to positions where this written token equals the current token, and copies the tokens at these positions
(Olsson et al., 2022). From a random start, a model with a million parameters needs some million tokens to find this circuit.
Only then does it learn to answer from a passage in its context. With this initialisation it starts with a rough circuit and
refines it.

In detail, head i of the first layer attends to the token offsets[i] back. Its q and k biases are the same vector, but q's is
rotated by the offset, so that after RoPE their product is largest there. A model without biases gets the vector from a constant
that is added to all embeddings. The head writes a random projection of the token to the residual stream. The first head of group
j in the second layer attends to positions where head j mod len(offsets) of the first layer wrote the projection of the current
token, and copies the tokens at these positions to the residual stream.

Initial attention that resembles trained attention is called mimetic initialisation (Trockman and Kolter, 2023).
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from rrl.errors import UserError
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.rope import frequencies

_FAST, _SLOW = 0.02, 0.01
"""RoPE frequencies (radians per position): those above _FAST distinguish positions; those below _SLOW hardly rotate within a
passage."""

_CONSTANT = 4.0
"""Size of the constant component added to all embeddings of a model without biases, in standard deviations of the embeddings."""


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
    """Writes induction heads into the first two layers of a new decoder, in place (see the module's docstring).

    Args:
        decoder: without norms of q and k (Qwen2, Llama). Changes the first len(offsets) heads of the first layer, the first
            head of each group in the second layer, and the keys and values of the groups of all these heads. In a model
            without biases also changes the embeddings.
        seed: of the random projections.
        offsets: how many tokens back each head of the first layer attends.
        bias: norm of each rotated pair in the first layer's biases; its square scales the attention scores.
        noted: size of the projection that the first layer writes, in standard deviations of the embeddings.
        gain: scale of the second layer's queries and keys; its square scales the attention scores.
        copied: size of the token that the second layer copies to its output, in standard deviations of the embeddings.

    Raises UserError if the model has norms of q and k or fewer than two layers, or if there are too many offsets.
    """
    _check_offsets(decoder, offsets)
    c, rng, p = decoder.config, np.random.default_rng(seed), _attention_parameters(decoder)
    scale = float(np.std(np.asarray(decoder.embedding[...])))
    # The subspaces for reading a token, for each head's output, and for the constant are orthogonal.
    width = (1 + len(offsets)) * c.head_dim
    basis = _orthonormal(rng, c.hidden, width + (not c.qkv_bias))
    read, *write = np.split(basis[:, :width], 1 + len(offsets), axis=1)
    if not c.qkv_bias:
        _add_constant(decoder, basis[:, -1], _CONSTANT * scale)

    # First layer: the attended position does not depend on the tokens.
    frequency, group = frequencies(c), c.heads // c.kv_heads
    amplitude = bias * (frequency > _FAST)  # of each pair of dimensions
    for head, offset in enumerate(offsets):
        angle = -offset * frequency
        query = np.concatenate([np.cos(angle) * amplitude, np.sin(angle) * amplitude])
        _set_for_all_tokens(p, c, "q", head, query, basis[:, -1])
        p["o"][0, head] = noted * scale * write[head].T
    for kv in range(-(-len(offsets) // group)):
        key = np.concatenate([amplitude, np.zeros_like(amplitude)])
        _set_for_all_tokens(p, c, "k", kv, key, basis[:, -1])
        p["v"][0, :, kv] = read

    # Second layer: q projects the current token as the first layer does; k reads the first layer's output.
    slow = np.tile(frequency < _SLOW, 2)
    for kv in range(c.kv_heads):
        head = kv * group  # the other heads of the group are not changed
        p["k"][1, :, kv] = gain * slow * write[kv % len(offsets)]
        p["q"][1, :, head] = gain * slow * read
        copy = _orthonormal(rng, c.hidden, c.head_dim)
        p["v"][1, :, kv] = copy
        p["o"][1, head] = copied * scale * copy.T
    _set_attention_parameters(decoder, p)


def _check_offsets(decoder: Decoder, offsets: Sequence[int]) -> None:
    """Raises UserError if the model cannot hold induction heads with these offsets."""
    c = decoder.config
    max_offsets = min(c.heads, (c.hidden - (not c.qkv_bias)) // c.head_dim - 1)
    if c.qk_norm or c.layers < 2 or not 1 <= len(offsets) <= max_offsets:
        raise UserError(
            f"offsets={tuple(offsets)}: induction heads need a model without norms of q and k (qwen2, llama), at least two "
            f"layers, and 1 to {max_offsets} offsets (limited by heads and hidden size); this model is {c.model_type} with "
            f"{c.layers} layers"
        )


def _attention_parameters(decoder: Decoder) -> dict[str, np.ndarray]:
    """Returns name -> a float32 copy of the attention's parameters of all layers that `init_induction_heads` changes."""
    names = ("q", "k", "v", "o", *(("q_bias", "k_bias") if decoder.config.qkv_bias else ()))
    return {name: np.array(getattr(decoder.layers, name)[...], np.float32) for name in names}


def _set_attention_parameters(decoder: Decoder, values: dict[str, np.ndarray]) -> None:
    """Sets these parameters, in their own dtype."""
    for name, value in values.items():
        variable = getattr(decoder.layers, name)
        variable[...] = jnp.asarray(value, variable[...].dtype)


def _set_for_all_tokens(
    p: dict[str, np.ndarray], c: DecoderConfig, name: str, head: int, value: np.ndarray, constant: np.ndarray
) -> None:
    """Sets q or k of a head in the first layer to `value` for all tokens; `constant`: the direction that all embeddings share."""
    p[name][0, :, head] *= 0.1  # the part that depends on the token becomes small
    if c.qkv_bias:
        p[f"{name}_bias"][0, head] = value
    else:
        # `size` is the constant component after RMSNorm. Before RMSNorm, in standard deviations of the embeddings, this
        # component is _CONSTANT and the other D - 1 are about 1.
        size = _CONSTANT / np.sqrt(1 + (_CONSTANT**2 - 1) / c.hidden)
        p[name][0, :, head] += np.outer(constant, value / size)


def _add_constant(decoder: Decoder, direction: np.ndarray, size: float) -> None:
    """Sets the component of all embeddings along a unit vector to `size`."""
    table = np.asarray(decoder.embedding[...], np.float32)
    moved = table - np.outer(table @ direction, direction) + size * direction
    decoder.embedding[...] = jnp.asarray(moved, decoder.embedding[...].dtype)


def _orthonormal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """A random [rows, columns] matrix with orthonormal columns."""
    return np.linalg.qr(rng.normal(size=(rows, columns)))[0].astype(np.float32)
