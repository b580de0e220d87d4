"""Dynamic sampling: selects the groups that an update learns from, and sets how many more must be sampled."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from rrl.errors import at_least
from rrl.rl.advantages import low_spread


@dataclasses.dataclass(frozen=True)
class DynamicSampling:
    """State of the rollout rounds of one training step: sample until enough groups have different rewards.

    Source: DAPO, section 3.2 and Algorithm 1. The state is immutable; `after` returns the next one, so that a step is a
    pure function of its samples.
    """

    target_groups: int
    """Number of groups that the update needs."""
    max_rounds: int = 3
    """Rounds after which the update uses the groups found so far. Without it, a policy that always or never succeeds would
    loop for ever."""
    drop_spread: float | None = 0.0
    """Groups whose rewards differ by at most this are dropped; 0: groups with equal rewards; None: no group."""
    rounds: int = 0
    """Rounds so far."""
    sampled: int = 0
    """Number of groups sampled so far."""
    selected: tuple[int, ...] = ()
    """Ids of the groups to learn from, in sampling order, at most `target_groups`."""

    def __post_init__(self) -> None:
        at_least(1, self, "target_groups", "max_rounds")
        if self.drop_spread is not None:
            at_least(0, self, "drop_spread")

    def after(
        self,
        rewards: Float[np.ndarray, "N"],
        groups: Sequence[int] | Int[np.ndarray, "N"],
        left_out: Bool[np.ndarray, "N"] | None = None,
    ) -> "DynamicSampling":
        """The state after one more round.

        Args:
          rewards: of the round's trajectories.
          groups: group id of each trajectory; ids must differ from those of earlier rounds.
          left_out: True on trajectories whose group must not be learned from, whatever its rewards.
        """
        groups = np.asarray(groups)
        ids = list(dict.fromkeys(groups.tolist()))
        dropped = np.zeros(len(groups), bool) if left_out is None else left_out
        if self.drop_spread is not None:
            dropped = dropped | low_spread(rewards, groups, self.drop_spread)
        informative = set(groups[~dropped].tolist())
        selected = (*self.selected, *(group for group in ids if group in informative))[: self.target_groups]
        return dataclasses.replace(
            self, rounds=self.rounds + 1, sampled=self.sampled + len(ids), selected=selected
        )

    @property
    def done(self) -> bool:
        """True if enough groups are selected or no round is left."""
        return len(self.selected) >= self.target_groups or self.rounds >= self.max_rounds

    @property
    def next_round(self) -> int:
        """Number of groups to sample next: the missing groups divided by the fraction selected so far, at most
        `target_groups`."""
        if self.done:
            return 0
        missing = self.target_groups - len(self.selected)
        if not self.selected:
            return self.target_groups
        return min(self.target_groups, math.ceil(missing * self.sampled / len(self.selected)))
