"""The critic's mathematics: clipped value loss and explained variance."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

MOMENTS = ("count", "return", "return_squared", "error", "error_squared")
"""Names of the sums that `value_moments` returns."""


def value_loss(
    value: Float[Array, "B T"],
    old_value: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    *,
    clip: float | None = 0.5,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """½·max((V - R)², (clip(V, V_old ± clip) - R)²) per token, and 1.0 on tokens whose loss was clipped.

    Source: PPO's released implementation (Dhariwal et al. 2017); the paper's Eq. 9 is the case without a clip. With the
    maximum, a value that has moved by more than `clip` towards its return gets no further gradient from this batch.

    Args:
      value: current V.
      old_value: V before the update.
      returns: R.
      clip: largest change of a value towards its return that still gets a gradient; None: no clipping.
    """
    plain = jnp.square(value - returns)
    if clip is None:
        return 0.5 * plain, jnp.zeros_like(plain)
    bounded = jnp.square(old_value + jnp.clip(value - old_value, -clip, clip) - returns)
    return 0.5 * jnp.maximum(plain, bounded), (bounded > plain).astype(jnp.float32)


def value_moments(
    value: Float[Array, "B T"], returns: Float[Array, "B T"], mask: Float[Array, "B T"]
) -> dict[str, Float[Array, ""]]:
    """Sums over the tokens where `mask` is 1; the keys are `MOMENTS`.

    Add them over microbatches and pass them to `explained_variance`.
    """
    error = returns - value
    parts = (jnp.ones_like(mask), returns, jnp.square(returns), error, jnp.square(error))
    return {name: jnp.sum(mask * part) for name, part in zip(MOMENTS, parts, strict=True)}


def explained_variance(moments: Mapping[str, float]) -> float:
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for one as good as a constant, and 0 if all returns are equal."""
    count = max(moments["count"], 1.0)
    total = moments["return_squared"] / count - (moments["return"] / count) ** 2
    residual = moments["error_squared"] / count - (moments["error"] / count) ** 2
    return 1.0 - residual / total if total > 1e-12 else 0.0
