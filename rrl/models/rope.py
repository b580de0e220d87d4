"""Rotary position embeddings (RoPE; RoFormer) in Hugging Face's half-split form, with Llama 3.1's scaling."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rrl.models.config import DecoderConfig


def frequencies(config: DecoderConfig) -> Float[np.ndarray, "H/2"]:
    """Angle per position of each pair of dimensions, in radians, float32."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    inverse = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return inverse
    wavelength = 2 * np.pi / inverse
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (inverse * (smooth + (1 - smooth) / scaling.factor)).astype(np.float32)


def rotation(
    config: DecoderConfig, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T H/2"], Float[Array, "B T H/2"]]:
    """Cosine and sine of each token's angles, float32."""
    angles = positions[..., None].astype(jnp.float32) * frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T H/2"], sin: Float[Array, "B T H/2"]
) -> Float[Array, "B T N H"]:
    """Rotates each pair (i, i + H/2) of x by its angle; computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
