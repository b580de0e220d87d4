"""The critic's mathematics: clipped value loss, and how much of the returns' variance values explain."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

MOMENTS = ("count", "return", "return_squared", "error", "error_squared")


def value_loss(
    value: Float[Array, "B T"],
    old_value: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    *,
    clip: float | None = 0.5,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """½·max((V - R)², (clip(V, V_old ± clip) - R)²) per token, and 1.0 where the clip decided.

    Source: PPO's released implementation (Dhariwal et al. 2017); the paper's Eq. 9 is the case without a clip. The larger
    side wins, so that a value that has moved by more than `clip` towards its return learns no further from this batch.

    Args:
      value: V now.
      old_value: V when the batch was made.
      returns: R.
      clip: the largest useful change; None: no bound.
    """
    plain = jnp.square(value - returns)
    if clip is None:
        return 0.5 * plain, jnp.zeros_like(plain)
    bounded = jnp.square(old_value + jnp.clip(value - old_value, -clip, clip) - returns)
    return 0.5 * jnp.maximum(plain, bounded), (bounded > plain).astype(jnp.float32)


def value_moments(
    value: Float[Array, "B T"], returns: Float[Array, "B T"], mask: Float[Array, "B T"]
) -> dict[str, Float[Array, ""]]:
    """Sums over masked tokens, to be added over microbatches and given to `explained_variance`."""
    error = returns - value
    parts = (jnp.ones_like(mask), returns, jnp.square(returns), error, jnp.square(error))
    return {name: jnp.sum(mask * part) for name, part in zip(MOMENTS, parts, strict=True)}


def explained_variance(moments: Mapping[str, float]) -> float:
    """1 - Var(R - V) / Var(R): 1 is a perfect critic, 0 one as good as a constant; 0 where the returns are all equal."""
    count = max(moments["count"], 1.0)
    total = moments["return_squared"] / count - (moments["return"] / count) ** 2
    left = moments["error_squared"] / count - (moments["error"] / count) ** 2
    return 1.0 - left / total if total > 1e-12 else 0.0
