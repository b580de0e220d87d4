"""Dynamic sampling: which groups of questions a step learns from, and how many more it has to ask."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from rrl.errors import at_least
from rrl.rl.advantages import low_spread


@dataclasses.dataclass(frozen=True)
class DynamicSampling:
    """Rounds of rollouts until enough groups have spread in their rewards (DAPO, section 3.2 and Algorithm 1).

    A value, not a process: `after` returns the next one, so that a step is a pure function of what was sampled.
    """

    target_groups: int
    """Groups that the update needs."""
    max_rounds: int = 3
    """Rounds after which the update takes what there is: a policy that always or never succeeds must not loop for ever."""
    drop_spread: float | None = 0.0
    """A group whose rewards lie within this of each other is dropped (0: all equal); None: no group."""
    rounds: int = 0
    sampled: int = 0
    """Groups seen so far."""
    selected: tuple[int, ...] = ()
    """Numbers of the groups to learn from, in the order they came, at most `wanted`."""

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
        """The state after one more round; groups must have numbers that no former round used.

        `left_out` marks groups that shall not be learned from, whatever their spread.
        """
        groups = np.asarray(groups)
        names = list(dict.fromkeys(groups.tolist()))
        dropped = np.zeros(len(groups), bool) if left_out is None else left_out
        if self.drop_spread is not None:
            dropped = dropped | low_spread(rewards, groups, self.drop_spread)
        informative = set(groups[~dropped].tolist())
        selected = (*self.selected, *(name for name in names if name in informative))[: self.target_groups]
        return dataclasses.replace(
            self, rounds=self.rounds + 1, sampled=self.sampled + len(names), selected=selected
        )

    @property
    def done(self) -> bool:
        """True when there are enough groups, or no round is left."""
        return len(self.selected) >= self.target_groups or self.rounds >= self.max_rounds

    @property
    def next_round(self) -> int:
        """Groups to ask for now: those missing, divided by the share that had spread so far; at most `wanted`."""
        if self.done:
            return 0
        missing = self.target_groups - len(self.selected)
        if not self.selected:
            return self.target_groups
        return min(self.target_groups, math.ceil(missing * self.sampled / len(self.selected)))
