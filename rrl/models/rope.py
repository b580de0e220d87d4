"""Rotary position embeddings (RoPE; RoFormer) in Hugging Face's half-split form, with the scalings of `rope_scaling`."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rrl.models.config import DecoderConfig

Rotation = tuple[Float[Array, "B T H/2"], Float[Array, "B T H/2"]]
"""Cosine and sine of each token's angles, float32."""


def frequencies(config: DecoderConfig, theta: float | None = None) -> Float[np.ndarray, "H/2"]:
    """Angle per position of each pair of dimensions, in radians, float32. `theta`: another base, without scaling."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    inverse = (1.0 / np.float32(theta or config.rope_theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling
    return inverse if scaling is None or theta else scaling.scale(inverse, config.rope_theta)


def rotation(config: DecoderConfig, positions: Int[Array, "B T"]) -> Rotation:
    """Cosine and sine of each token's angles, times `rotation_scale` of the scaling."""
    angles = positions[..., None].astype(jnp.float32) * frequencies(config)
    scale = 1.0 if config.rope_scaling is None else config.rope_scaling.rotation_scale
    return _scaled_rotation(angles, scale)


def rotation_by_layer(
    config: DecoderConfig, positions: Int[Array, "B T"]
) -> Callable[[Bool[Array, ""] | None], Rotation]:
    """Returns a function that gives the `rotation` of a layer.

    Its argument is whether the layer has the sliding window. Such layers may have another RoPE base (`local_rope_theta`).
    """
    local_theta = config.local_rope_theta
    if local_theta is None or not config.sliding_layers:
        shared = rotation(config, positions)
        return lambda slides: shared

    def rotation_of_layer(slides: Bool[Array, ""] | None) -> Rotation:
        scale = 1.0 if config.rope_scaling is None else config.rope_scaling.rotation_scale
        frequency = jnp.where(slides, frequencies(config, local_theta), frequencies(config))
        angles = positions[..., None].astype(jnp.float32) * frequency
        return _scaled_rotation(angles, 1.0 if scale == 1.0 else jnp.where(slides, 1.0, scale))

    return rotation_of_layer


def _scaled_rotation(angles: Float[Array, "B T H/2"], scale: float | Array) -> Rotation:
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    unscaled = isinstance(scale, float) and scale == 1.0
    return (cos, sin) if unscaled else (cos * scale, sin * scale)


def rotate(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T H/2"], sin: Float[Array, "B T H/2"]
) -> Float[Array, "B T N H"]:
    """Rotates each pair (i, i + H/2) of x by its angle; computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
