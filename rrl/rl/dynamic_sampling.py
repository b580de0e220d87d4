"""Dynamic sampling: which groups of a step are informative, and how many more groups to sample (DAPO, section 3.2)."""

import math

import numpy as np
from jaxtyping import Bool, Float, Int

from rrl.rl.advantages import low_spread


def informative_groups(
    rewards: Float[np.ndarray, "N"],
    groups: Int[np.ndarray, "N"],
    drop_spread: float | None = 0.0,
    excluded: Bool[np.ndarray, "N"] | None = None,
) -> list[int]:
    """Ids of the groups that an update can learn from, in the order of their first trajectory.

    Args:
      rewards: total reward of each trajectory.
      groups: group id of each trajectory.
      drop_spread: groups whose rewards differ by at most this are dropped; 0: groups with equal rewards; None: no group.
      excluded: mask of trajectories, from the recipe. A group is also dropped if the mask is True for all of its trajectories.
    """
    dropped = np.zeros(len(groups), bool) if excluded is None else excluded
    if drop_spread is not None:
        dropped = dropped | low_spread(rewards, groups, drop_spread)
    informative = set(groups[~dropped].tolist())
    return [group for group in dict.fromkeys(groups.tolist()) if group in informative]


def groups_to_sample(target: int, sampled: int, informative: int) -> int:
    """Number of groups to sample in the next round; 0 if `target` groups are informative.

    It is the number of missing groups divided by the fraction that was informative so far, at most `target`.

    Args:
      target: number of informative groups that the step needs.
      sampled: number of groups sampled so far.
      informative: number of those that are informative.
    """
    missing = max(0, target - informative)
    if not missing or not informative:
        return missing
    return min(target, math.ceil(missing * sampled / informative))
