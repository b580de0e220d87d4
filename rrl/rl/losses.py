"""Policy losses per token, and the weights that make any split into microbatches give the same gradient."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rrl.errors import UserError

AGGREGATIONS = ("token_mean", "sequence_mean", "group_token_mean", "constant")
KL_ESTIMATORS = ("k1", "k2", "k3")


def clipped_objective(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantage: Float[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:
    """PPO's clipped surrogate as a loss per token (PPO, Eq. 7; with two clip bounds as in DAPO, Eq. 10).

    Args:
      logp: log-probabilities under the current policy.
      old_logp: log-probabilities that the ratio is taken against.
      advantage: one per token.
      clip_low: the ratio is clipped below at 1 - clip_low.
      clip_high: the ratio is clipped above at 1 + clip_high.
      dual_clip: c > 1 bounds the loss of a token with a negative advantage by c·|A| (Ye et al. 2020, Eq. 5). Without it
        that loss grows with the ratio without bound. None: no bound.

    Returns:
      Loss, ratio, and 1.0 on tokens whose loss was clipped.
    """
    ratio = jnp.exp(logp - old_logp)
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    plain, bounded = ratio * advantage, clipped * advantage
    loss, was_clipped = -jnp.minimum(plain, bounded), bounded < plain
    if dual_clip is not None:
        ceiling = -dual_clip * advantage
        over = (advantage < 0) & (loss > ceiling)
        loss, was_clipped = jnp.where(over, ceiling, loss), was_clipped | over
    return loss, ratio, was_clipped.astype(jnp.float32)


def kl_estimate(
    logp: Float[Array, "B T"], reference: Float[Array, "B T"], estimator: str = "k3"
) -> Float[Array, "B T"]:
    """Estimates KL(policy || reference) per sampled token (Schulman 2020, "Approximating KL divergence").

    With d = reference - logp:
    k1 = -d is unbiased and may be negative. As a loss its gradient is zero on average, so use it in the reward.
    k2 = d²/2 is biased; on policy, its gradient is that of the KL.
    k3 = e^d - d - 1 is unbiased and never negative (GRPO; DeepSeekMath, Eq. 4). d is clipped to [-20, 20], so that a single
    outlier stays finite.
    """
    if estimator == "k1":
        return logp - reference
    if estimator == "k2":
        return 0.5 * jnp.square(logp - reference)
    if estimator == "k3":
        difference = jnp.clip(reference - logp, -20.0, 20.0)
        return jnp.exp(difference) - difference - 1.0
    raise UserError(f"kl_estimator={estimator!r} is unknown; choose one of {', '.join(KL_ESTIMATORS)}")


def truncated_importance(
    logp: Float[Array, "*shape"], sampled_logp: Float[Array, "*shape"], cap: float
) -> Float[Array, "*shape"]:
    """min(pi / mu, cap): a weight without gradient for each token's loss ("truncated importance sampling", Yao et al. 2025).

    Args:
      logp: log pi, the token's log-probability at the start of the update, as the trainer computes it.
      sampled_logp: log mu, its log-probability under the distribution it was sampled from, which may differ in kernel,
        dtype, temperature or top-p.
      cap: upper bound of the weight.
    """
    # The exponent is clipped rather than its exponential, which could overflow.
    return jax.lax.stop_gradient(jnp.exp(jnp.minimum(logp - sampled_logp, np.log(cap))))


def sequence_weights(
    policy_tokens: Int[np.ndarray, "N"],
    aggregation: str,
    groups: Int[np.ndarray, "N"] | None = None,
    constant_tokens: int = 1,
) -> tuple[Float[np.ndarray, "N"], float]:
    """Per-token weight of each sequence, and the number that the weighted sum of losses is divided by.

    In the policy update a sequence is a whole trajectory, even if it has several contexts.

    Args:
      policy_tokens: number of policy tokens of each sequence.
      aggregation: how the loss is averaged:
        "token_mean": over all policy tokens of the batch (DAPO, Eq. 8, over the batch).
        "sequence_mean": token mean per sequence, then mean over sequences (GRPO as published).
        "group_token_mean": token mean per group, then mean over groups (R2AG, Eq. 6).
        "constant": token sum per sequence divided by `constant_tokens`, then mean over sequences (Dr. GRPO: Liu et al.
        2025, Listing 1; with 1, TIRESRAG-R1's objective as printed in section 4.2).
      groups: group id of each sequence; needed by "group_token_mean".
      constant_tokens: the divisor of "constant".
    """
    sequences = float(max(len(policy_tokens), 1))
    if aggregation == "token_mean":
        return np.ones(len(policy_tokens), np.float32), float(max(policy_tokens.sum(), 1))
    if aggregation == "sequence_mean":
        return (1.0 / np.maximum(policy_tokens, 1)).astype(np.float32), sequences
    if aggregation == "group_token_mean":
        if groups is None:
            raise UserError("aggregation='group_token_mean' needs the group ids: pass `groups`")
        names, index = np.unique(groups, return_inverse=True)
        tokens = np.bincount(index, policy_tokens, minlength=len(names))
        return (1.0 / np.maximum(tokens, 1))[index].astype(np.float32), float(max(len(names), 1))
    if aggregation == "constant":
        return np.full(len(policy_tokens), 1.0 / constant_tokens, np.float32), sequences
    raise UserError(f"aggregation={aggregation!r} is unknown; choose one of {', '.join(AGGREGATIONS)}")
