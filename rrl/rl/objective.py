"""The policy's objective: its settings, and the loss of a microbatch."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rrl.errors import UserError, at_least, at_most, one_of
from rrl.rl.batch import Batch
from rrl.rl.logprobs import TokenScores
from rrl.rl.losses import AGGREGATIONS, KL_ESTIMATORS, clipped_objective, kl_estimate, truncated_importance

KL_PLACES = ("loss", "reward")


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """The policy objective; defaults are R-Search's GRPO."""

    kl_coef: float = 0.001
    """Weight of the estimate of KL(policy || reference)."""
    kl_estimator: str = "k3"
    """k1, k2 or k3; as a loss k1 has no gradient on average, in the reward it is the one to take."""
    kl_in: str = "loss"
    """Where the KL stands: added to the "loss", or subtracted from the "reward" of each token (PPO, REINFORCE++)."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """Bound, in units of |advantage|, of what a token with a negative advantage may cost (usually 3); None: none."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    importance_cap: float | None = None
    """Truncated importance sampling: tokens are weighed by what the trainer's log-probabilities say against those of the
    distribution that was sampled, at most this much (usually 2). The ratio then starts from the trainer's log-probabilities,
    which costs one more forward pass. None: the sampler's log-probabilities are taken as they are."""
    whiten: bool = False
    """Advantages get mean 0 and deviation 1 over the policy tokens of the rollout batch (REINFORCE++)."""
    aggregation: str = "token_mean"
    """What the loss is a mean over: policy tokens, sequences of token means ("sequence_mean"), groups of token means
    ("group_token_mean"), or sequences of token sums over `constant_tokens` ("constant")."""
    constant_tokens: int = 1024
    """What "constant" divides each sequence's sum by: Dr. GRPO takes the longest output allowed."""
    drop_spread: float | None = None
    """Leave out groups whose total rewards lie within this of each other (0: are all equal), and with them their KL;
    None: no group."""
    minibatches: int = 1
    """Optimiser steps an epoch, each on its share of the groups."""
    epochs: int = 1
    """Passes over a rollout batch."""
    microbatch_tokens: int = 8192
    """Tokens whose activations exist at a time."""
    row_lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    """Row lengths that are compiled; the last is the longest trajectory, or tree of several (`share_prefixes`)."""
    share_prefixes: bool = False
    """Contexts that begin alike, the steps of one trajectory (R3-RAG) or the samples of one prompt (R2AG), lie in a row as one
    tree, whose trunk is computed once (`rrl.rl.prefix_tree`). Splash attention cannot do it."""
    parallel_microbatches: int = 1
    """On one CPU: microbatches that are computed at once, each stream adding to a sum of its own, since one by itself leaves
    a part of a second core idle. Other devices have one. The last bits of a gradient depend on it, not on the cores."""

    def __post_init__(self) -> None:
        if (
            not self.row_lengths
            or list(self.row_lengths) != sorted(set(self.row_lengths))
            or self.row_lengths[0] < 1
        ):
            raise UserError(f"objective.row_lengths={self.row_lengths} must be increasing row lengths")
        at_least(
            1,
            self,
            "minibatches",
            "epochs",
            "microbatch_tokens",
            "parallel_microbatches",
            "constant_tokens",
            where="objective.",
        )
        at_least(0, self, "kl_coef", "clip_low", "clip_high", "entropy_coef", where="objective.")
        at_most(1, self, "clip_low", where="objective.")  # no ratio is below 0
        if self.drop_spread is not None:
            at_least(0, self, "drop_spread", where="objective.")
        for field in ("dual_clip", "importance_cap"):
            if getattr(self, field) is not None:
                at_least(1, self, field, where="objective.")
        one_of(AGGREGATIONS, self, "aggregation", where="objective.")
        one_of(KL_ESTIMATORS, self, "kl_estimator", where="objective.")
        one_of(KL_PLACES, self, "kl_in", where="objective.")

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps a rollout batch, where it has that many groups."""
        return self.minibatches * self.epochs

    @property
    def kl_in_reward(self) -> bool:
        """True where the reward of each token pays for the KL."""
        return self.kl_in == "reward" and self.kl_coef > 0

    @property
    def extras(self) -> tuple[str, ...]:
        """The per-token arrays of an update's microbatches, all float32: what `policy_loss` reads, and the reference's
        log-probabilities where the reward has asked for them already."""
        sampled = ("sampled_logp",) if self.importance_cap is not None else ()
        reference = ("reference_logp",) if self.kl_in_reward else ()
        return ("old_logp", "advantage", "weight", *sampled, *reference)

    @property
    def sums(self) -> tuple[str, ...]:
        """What `policy_loss` sums over the tokens of an update."""
        weighed = ("importance",) if self.importance_cap is not None else ()
        return ("kl", "entropy", "ratio", "clip_fraction", "step_kl", "logp_gap", "tokens", *weighed)

    def rows_per_microbatch(self, length: int, shards: int = 1) -> int:
        """Rows of this length in a microbatch: the same number, at least one, on each of the data shards."""
        return shards * max(1, self.microbatch_tokens // (length * shards))


def policy_loss(
    scores: TokenScores, reference: Float[Array, "B T"], batch: Batch, config: ObjectiveConfig
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The weighted sum of the loss over a microbatch's policy tokens, and sums of what is told about them.

    Args:
      scores: log-probability (with its gradient) and entropy of each policy token now.
      reference: log-probabilities under the frozen reference.
      batch: its extras are `config.extras`: log-probabilities that the ratio starts from, advantage, and the weight of the
        aggregation (`rrl.rl.losses.sequence_weights`).
      config: the objective.
    """
    old = batch.extras["old_logp"]
    objective, ratio, clipped = clipped_objective(
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
        objective = importance * objective
        sums["importance"] = jnp.sum(mask * importance)
    kl = kl_estimate(scores.logp, jax.lax.stop_gradient(reference), config.kl_estimator)
    if config.kl_in == "loss":
        objective = objective + config.kl_coef * kl
    assert scores.entropy is not None
    if config.entropy_coef:
        objective = objective - config.entropy_coef * scores.entropy
    value = jnp.sum(mask * batch.extras["weight"] * objective)
    return value, sums | {
        "kl": jnp.sum(mask * kl),
        "entropy": jnp.sum(mask * scores.entropy),
        "ratio": jnp.sum(mask * ratio),
        "clip_fraction": jnp.sum(mask * clipped),
        "step_kl": jnp.sum(mask * kl_estimate(old, scores.logp, "k3")),
        "logp_gap": jnp.sum(mask * jnp.abs(scores.logp - old)),
        "tokens": jnp.sum(mask),
    }
