"""The policy's loss, and the weights of its tokens. Read `policy_loss` first.

With these weights the gradient does not depend on how trajectories are divided into microbatches.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rrl.errors import UserError
from rrl.rl.batch import Batch
from rrl.rl.logprobs import TokenScores
from rrl.rl.objective import AGGREGATIONS, KL_ESTIMATORS, ObjectiveConfig


def policy_loss(
    scores: TokenScores, reference: Float[Array, "B T"], batch: Batch, config: ObjectiveConfig
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of a microbatch, and sums over its policy tokens for metrics (`ObjectiveConfig.sum_names`).

    The loss is the sum over policy tokens of weight · (clipped surrogate + kl_coef · KL - entropy_coef · entropy). The KL term is
    absent if the KL is in the reward. With `config.importance_cap` the surrogate is multiplied by the importance weight.

    Args:
      scores: log-probability and entropy of each policy token under the current policy; both carry the gradient.
      reference: log-probabilities under the frozen reference.
      batch: its extras are `config.extra_names`: "old_logp", the log-probabilities that the ratio is taken against;
        "advantage"; "weight", from `sequence_weights`; and others that depend on `config`.
      config: the objective.
    """
    old = batch.extras["old_logp"]
    token_loss, ratio, clipped = clipped_objective(
        scores.logp,
        old,
        batch.extras["advantage"],
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    mask = batch.loss_mask.astype(jnp.float32)
    sums = {}
    if config.importance_cap is not None:
        importance = truncated_importance(old, batch.extras["sampled_logp"], config.importance_cap)
        token_loss = importance * token_loss
        sums["importance"] = jnp.sum(mask * importance)
    kl = kl_estimate(scores.logp, jax.lax.stop_gradient(reference), config.kl_estimator)
    if config.kl_in == "loss":
        token_loss = token_loss + config.kl_coef * kl
    assert scores.entropy is not None
    if config.entropy_coef:
        token_loss = token_loss - config.entropy_coef * scores.entropy
    loss = jnp.sum(mask * batch.extras["weight"] * token_loss)
    return loss, sums | {
        "kl": jnp.sum(mask * kl),
        "entropy": jnp.sum(mask * scores.entropy),
        "ratio": jnp.sum(mask * ratio),
        "clip_fraction": jnp.sum(mask * clipped),
        "approx_kl": jnp.sum(mask * kl_estimate(old, scores.logp, "k3")),
        "sampling_logp_diff": jnp.sum(mask * jnp.abs(scores.logp - old)),
        "tokens": jnp.sum(mask),
    }


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
        "token_mean": over all policy tokens (DAPO's Eq. 8, which averages over the tokens of one group).
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
