"""Advantages from rewards: pure functions on the host, one number a trajectory."""

import numpy as np
from jaxtyping import Bool, Float, Int


def group_normalize(
    rewards: Float[np.ndarray, "N"],
    groups: Int[np.ndarray, "N"],
    *,
    epsilon: float = 1e-6,
    unbiased: bool = True,
    scale: bool = True,
) -> Float[np.ndarray, "N"]:
    """(r - mean of its group) / (std of its group + epsilon): GRPO's advantage (DeepSeekMath, section 4.1.2).

    Args:
      rewards: one a trajectory.
      groups: samples of one question share a number.
      epsilon: added to the standard deviation.
      unbiased: divide by n - 1 in the standard deviation (as released R-Search does); a group of one has std 0.
      scale: False leaves the division out (Dr. GRPO).
    """
    _, index = np.unique(groups, return_inverse=True)
    rewards = np.asarray(rewards, np.float64)
    count = np.bincount(index)
    mean = np.bincount(index, rewards) / count
    centred = rewards - mean[index]
    if scale:
        freedom = np.maximum(count - 1, 1) if unbiased else count
        deviation = np.sqrt(np.bincount(index, centred**2) / freedom)
        centred = centred / (deviation[index] + epsilon)
    return centred.astype(np.float32)


def low_spread(
    rewards: Float[np.ndarray, "N"], groups: Int[np.ndarray, "N"], most: float = 0.0
) -> Bool[np.ndarray, "N"]:
    """True where the rewards of a trajectory's group lie within `most` of each other.

    A group of equal rewards says nothing about what is better (DAPO, section 3.2); one whose rewards hardly differ says
    as much as any other once it is divided by its standard deviation.
    """
    _, index = np.unique(groups, return_inverse=True)
    high = np.full(index.max(initial=-1) + 1, -np.inf)
    low = np.full_like(high, np.inf)
    np.maximum.at(high, index, rewards)
    np.minimum.at(low, index, rewards)
    return (high - low)[index] <= most + 1e-8
