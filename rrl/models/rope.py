"""Rotary position embeddings (RoPE; RoFormer) in Hugging Face's half-split form, with the scalings of `rope_scaling`."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rrl.models.config import DecoderConfig

Rotation = tuple[Float[Array, "B T H/2"], Float[Array, "B T H/2"]]
"""Cosine and sine of each token's angles, float32."""


def frequencies(config: DecoderConfig) -> Float[np.ndarray, "H/2"]:
    """Angle per position of each pair of dimensions, in radians, float32."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    inverse = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling
    return inverse if scaling is None else scaling.scale(inverse, config.rope_theta)


def rotation(config: DecoderConfig, positions: Int[Array, "B T"]) -> Rotation:
    """Cosine and sine of each token's angles, times the scaling's factor."""
    angles = positions[..., None].astype(jnp.float32) * frequencies(config)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    scale = 1.0 if config.rope_scaling is None else config.rope_scaling.rotation_scale
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def rotate(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T H/2"], sin: Float[Array, "B T H/2"]
) -> Float[Array, "B T N H"]:
    """Rotates each pair (i, i + H/2) of x by its angle; computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
