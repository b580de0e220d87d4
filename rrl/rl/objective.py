"""`ObjectiveConfig`: the settings of the policy's loss, and of the optimiser steps and microbatches of an update."""

import dataclasses

from rrl.errors import UserError, at_least, at_most, one_of

AGGREGATIONS = ("token_mean", "sequence_mean", "group_token_mean", "constant")
KL_ESTIMATORS = ("k1", "k2", "k3")
KL_PLACES = ("loss", "reward")


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """The policy objective; the defaults are R-Search's GRPO. `rrl.rl.losses.policy_loss` is the loss."""

    kl_coef: float = 0.001
    """Weight of the estimated KL(policy || reference)."""
    kl_estimator: str = "k3"
    """k1, k2 or k3 (`rrl.rl.losses.kl_estimate`). Use k1 in the reward; as a loss its gradient is zero on average."""
    kl_in: str = "loss"
    """Where the KL is applied: added to the "loss", or subtracted from each token's "reward" (PPO, REINFORCE++)."""
    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The probability ratio is clipped above at 1 + clip_high; DAPO raises it to 0.28."""
    dual_clip: float | None = None
    """Upper bound, in units of |advantage|, of the loss of a token with a negative advantage (usually 3); None: no bound."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    importance_cap: float | None = None
    """Truncated importance sampling: each token's loss is weighted by the ratio of the trainer's probability to the sampler's,
    at most this (usually 2). The old policy in PPO's ratio is then evaluated by the trainer at the start of the update, which
    costs one more forward pass. None: no weights; the old log-probabilities are the sampler's."""
    whiten: bool = False
    """Whether advantages are normalised to mean 0 and std 1 over the policy tokens of the rollout batch (REINFORCE++)."""
    aggregation: str = "token_mean"
    """How token losses are averaged: "token_mean", "sequence_mean", "group_token_mean" or "constant"
    (`rrl.rl.losses.sequence_weights`)."""
    constant_tokens: int = 1024
    """Divisor of each sequence's loss sum with aggregation "constant". Dr. GRPO uses the longest output allowed."""
    drop_spread: float | None = None
    """Groups whose total rewards differ by at most this are left out of the update, including their KL; 0: groups with equal
    rewards; None: no group is left out. In a config the value may also be "auto", which is replaced by
    `Recipe.uninformative_spread` in the scale of the total (`rrl.setup.automatic`)."""
    minibatches: int = 1
    """Optimiser steps per epoch, each on its share of the groups."""
    epochs: int = 1
    """Passes over a rollout batch."""
    microbatch_tokens: int = 8192
    """Tokens per microbatch: those whose activations are in memory at a time."""
    row_lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    """Lengths of packed rows, in tokens; a program is compiled for each. The last is the largest length of a context. With
    `share_prefixes` it is also the largest length of a prefix tree."""
    share_prefixes: bool = False
    """Whether contexts with a common prefix share it in a packed row, where it is computed once (`rrl.rl.prefix_tree`). Such
    contexts are the steps of one trajectory (R3-RAG) or the samples of one prompt (R2AG). Splash attention does not support
    it."""
    parallel_microbatches: int = 1
    """Number of microbatches computed at the same time on a single CPU device, each in its own thread with its own gradient
    sum; one microbatch does not keep two cores busy. Other devices use 1. The last bits of a gradient depend on this number,
    but not on the number of cores."""

    def __post_init__(self) -> None:
        if (
            not self.row_lengths
            or list(self.row_lengths) != sorted(set(self.row_lengths))
            or self.row_lengths[0] < 1
        ):
            raise UserError(
                f"objective.row_lengths={self.row_lengths} must be increasing row lengths of at least 1 token"
            )
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
        at_most(1, self, "clip_low", where="objective.")  # a ratio is never below 0
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
        """Optimiser steps per rollout batch, if it has at least `minibatches` groups."""
        return self.minibatches * self.epochs

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is subtracted from the reward of each token."""
        return self.kl_in == "reward" and self.kl_coef > 0

    @property
    def extra_names(self) -> tuple[str, ...]:
        """Names of the per-token float32 arrays in an update's microbatches (`Batch.extras`).

        If the KL is in the reward, the reference's log-probabilities are among these arrays: the advantages depend on them, so
        they are computed before the update.
        """
        sampled = ("sampled_logp",) if self.importance_cap is not None else ()
        reference = ("reference_logp",) if self.kl_in_reward else ()
        return ("old_logp", "advantage", "weight", *sampled, *reference)

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the sums over tokens that `policy_loss` returns; `rrl.rl.update` explains them."""
        weights = ("importance",) if self.importance_cap is not None else ()
        return (
            "kl",
            "entropy",
            "ratio",
            "clip_fraction",
            "approx_kl",
            "sampling_logp_diff",
            "tokens",
            *weights,
        )

    def rows_per_microbatch(self, length: int, shards: int = 1) -> int:
        """Number of rows of this length in a microbatch; each data shard gets the same number, at least one."""
        return shards * max(1, self.microbatch_tokens // (length * shards))
