"""Policy objectives on token arrays: sums and weights, so that any split into microbatches gives the same gradient."""

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
    """PPO's clipped surrogate as a loss per token (PPO, Eq. 7; clip-higher as in DAPO, Eq. 10).

    `dual_clip` c > 1 bounds the loss of a negative advantage by c·|A|, which else grows with the ratio without end
    (Ye et al. 2020, Eq. 5).

    Returns the loss, the ratio, and 1.0 where a clip decided.
    """
    ratio = jnp.exp(logp - old_logp)
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    plain, bounded = ratio * advantage, clipped * advantage
    loss, active = -jnp.minimum(plain, bounded), bounded < plain
    if dual_clip is not None:
        ceiling = -dual_clip * advantage
        over = (advantage < 0) & (loss > ceiling)
        loss, active = jnp.where(over, ceiling, loss), active | over
    return loss, ratio, active.astype(jnp.float32)


def kl_estimate(
    logp: Float[Array, "B T"], reference: Float[Array, "B T"], estimator: str = "k3"
) -> Float[Array, "B T"]:
    """Estimate of KL(policy || reference) from sampled tokens (Schulman 2020, "Approximating KL divergence").

    With d = ref - logp: k1 = -d (unbiased, any sign; as a *loss* its gradient is zero on average, so it belongs in the
    reward), k2 = d²/2 (biased; its gradient is that of the KL on policy), k3 = e^d - d - 1 (unbiased, never negative; GRPO,
    DeepSeekMath, Eq. 4). The difference in k3 is bounded to +-20 so that one wild token stays finite.
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
    logp: Float[Array, "*shape"], sampled_logp: Float[Array, "*shape"], most: float
) -> Float[Array, "*shape"]:
    """min(pi / mu, most), a constant weight of each token's loss (Yao et al. 2025, "truncated importance sampling").

    Args:
      logp: log-probability of the token under the policy that the update starts from, as the trainer computes it.
      sampled_logp: the same under the distribution that it was drawn from: another kernel, dtype, temperature or top-p.
      most: the bound of the weight.
    """
    # Bounded in the exponent first: exp of a wild difference would be infinite before it is cut.
    return jax.lax.stop_gradient(jnp.exp(jnp.minimum(logp - sampled_logp, np.log(most))))


def sequence_weights(
    policy_tokens: Int[np.ndarray, "N"],
    aggregation: str,
    groups: Int[np.ndarray, "N"] | None = None,
    constant_tokens: int = 1,
) -> tuple[Float[np.ndarray, "N"], float]:
    """Weight of each policy token of each sequence, and what the weighted sum of losses is divided by.

    "token_mean": every policy token of the batch counts the same (DAPO, Eq. 8, over the batch). "sequence_mean": the mean
    over the sequences of each sequence's mean (GRPO as published). "group_token_mean": the mean over the groups of each
    group's token mean (R2AG, Eq. 6). "constant": the mean over the sequences of each one's sum divided by
    `constant_tokens` (Dr. GRPO: Liu et al. 2025, Listing 1; with 1, TIRESRAG-R1's objective as printed in 4.2).
    """
    sequences = float(max(len(policy_tokens), 1))
    if aggregation == "token_mean":
        return np.ones(len(policy_tokens), np.float32), float(max(policy_tokens.sum(), 1))
    if aggregation == "sequence_mean":
        return (1.0 / np.maximum(policy_tokens, 1)).astype(np.float32), sequences
    if aggregation == "group_token_mean":
        if groups is None:
            raise UserError("aggregation='group_token_mean' needs the groups of the sequences")
        names, index = np.unique(groups, return_inverse=True)
        tokens = np.bincount(index, policy_tokens, minlength=len(names))
        return (1.0 / np.maximum(tokens, 1))[index].astype(np.float32), float(max(len(names), 1))
    if aggregation == "constant":
        return np.full(len(policy_tokens), 1.0 / constant_tokens, np.float32), sequences
    raise UserError(f"aggregation={aggregation!r} is unknown; choose one of {', '.join(AGGREGATIONS)}")
