"""Policy objectives on token arrays: sums and weights, so that any split into microbatches gives the same gradient."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rrl.errors import UserError

AGGREGATIONS = ("token_mean", "sequence_mean")


def clipped_objective(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantage: Float[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:
    """PPO's clipped surrogate as a loss per token (PPO, Eq. 7; clip-higher as in DAPO, Eq. 10).

    Returns the loss, the ratio, and 1.0 where the clip was the smaller side.
    """
    ratio = jnp.exp(logp - old_logp)
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    plain, bounded = ratio * advantage, clipped * advantage
    return -jnp.minimum(plain, bounded), ratio, (bounded < plain).astype(jnp.float32)


def kl_k3(logp: Float[Array, "B T"], reference: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Unbiased, never negative estimate of KL(policy || reference) from sampled tokens: e^d - d - 1, d = ref - logp.

    Source: GRPO (DeepSeekMath, Eq. 4). The difference is bounded to +-20 so that one wild token stays finite.
    """
    difference = jnp.clip(reference - logp, -20.0, 20.0)
    return jnp.exp(difference) - difference - 1.0


def sequence_weights(
    policy_tokens: Int[np.ndarray, "N"], aggregation: str
) -> tuple[Float[np.ndarray, "N"], float]:
    """Weight of each policy token of each sequence, and what the weighted sum of losses is divided by.

    "token_mean": every policy token of the batch counts the same (DAPO, Eq. 8). "sequence_mean": the mean over the
    sequences of each sequence's mean (GRPO as published).
    """
    if aggregation == "token_mean":
        return np.ones(len(policy_tokens), np.float32), float(max(policy_tokens.sum(), 1))
    if aggregation == "sequence_mean":
        return (1.0 / np.maximum(policy_tokens, 1)).astype(np.float32), float(max(len(policy_tokens), 1))
    raise UserError(f"aggregation={aggregation!r} is unknown; choose one of {', '.join(AGGREGATIONS)}")
