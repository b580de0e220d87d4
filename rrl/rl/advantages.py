"""Advantages without a critic, per trajectory or per token: pure NumPy functions on the host."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

Estimator = Callable[[Float[np.ndarray, "N"], Int[np.ndarray, "N"]], Float[np.ndarray, "N"]]
"""(rewards, group ids) of the trajectories in an update -> one advantage per trajectory."""


def group_normalize(
    rewards: Float[np.ndarray, "N"],
    groups: Int[np.ndarray, "N"],
    *,
    epsilon: float = 1e-6,
    unbiased: bool = True,
    scale: bool = True,
) -> Float[np.ndarray, "N"]:
    """GRPO's advantage: (r - group mean) / (group std + epsilon) (DeepSeekMath, section 4.1.2).

    Args:
      rewards: one per trajectory.
      groups: group id of each trajectory; samples of one question share it.
      epsilon: added to the standard deviation.
      unbiased: divide by n - 1 in the standard deviation, as released R-Search does; a group of one has std 0.
      scale: False omits the division by the standard deviation (Dr. GRPO: Liu et al. 2025, section 3.2).
    """
    rewards = np.asarray(rewards, np.float64)
    index, count, mean = _group_statistics(rewards, groups)
    centred = rewards - mean[index]
    if scale:
        freedom = np.maximum(count - 1, 1) if unbiased else count
        deviation = np.sqrt(np.bincount(index, centred**2) / freedom)
        centred = centred / (deviation[index] + epsilon)
    return centred.astype(np.float32)


def leave_one_out(rewards: Float[np.ndarray, "N"], groups: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """RLOO's advantage: r - mean of the other rewards of the group (Ahmadian et al. 2024, Eq. 8); 0 in a group of one."""
    rewards = np.asarray(rewards, np.float64)
    index, count, mean = _group_statistics(rewards, groups)
    return ((rewards - mean[index]) * (count / np.maximum(count - 1, 1))[index]).astype(np.float32)


def batch_normalize(
    rewards: Float[np.ndarray, "N"],
    groups: Int[np.ndarray, "N"],
    *,
    baseline: bool = False,
    epsilon: float = 1e-8,
) -> Float[np.ndarray, "N"]:
    """REINFORCE++'s advantage per trajectory: (r - batch mean) / (batch std + epsilon), with the population std.

    Source: Hu et al. 2025, section 3.1; the alternative to GRPO in TIRESRAG-R1, Table 4 and appendix D. Every trajectory
    counts once. If the KL is part of the reward, advantages differ between tokens. The paper then starts from raw rewards
    (`raw_reward`), subtracts the KL to go (`subtract_penalty_to_go`) and whitens over all tokens (`whiten`).

    Args:
      rewards: one per trajectory.
      groups: group id of each trajectory; used only with `baseline`.
      baseline: subtract the group mean first ("REINFORCE++-baseline").
      epsilon: added to the standard deviation.
    """
    rewards = np.asarray(rewards, np.float64)
    if baseline:
        index, _, mean = _group_statistics(rewards, groups)
        rewards = rewards - mean[index]
    return ((rewards - rewards.mean()) / (rewards.std() + epsilon)).astype(np.float32)


def raw_reward(rewards: Float[np.ndarray, "N"], groups: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """The reward without a baseline: REINFORCE++'s starting point when advantages are whitened over tokens."""
    return np.asarray(rewards, np.float32)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": group_normalize,
    "grpo_population": functools.partial(group_normalize, unbiased=False),
    "dr_grpo": functools.partial(group_normalize, scale=False),
    "rloo": leave_one_out,
    "reinforce_plus_plus": batch_normalize,
    "reinforce_plus_plus_baseline": functools.partial(batch_normalize, baseline=True),
    "reward": raw_reward,
}
"""Advantage estimators by the name that a recipe's field `advantage` takes."""
GROUP_RELATIVE = ("grpo", "grpo_population", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Estimators that compare the samples of a group; with one sample per question their advantage is 0."""


def subtract_penalty_to_go(
    advantages: Float[np.ndarray, "N"], penalties: Sequence[Float[np.ndarray, "T"]]
) -> list[Float[np.ndarray, "T"]]:
    """Advantage per token: A - (sum of the penalties from this token to the end of the trajectory).

    With penalties beta·k1 this is the undiscounted return of a reward that contains the KL (REINFORCE++, Hu et al. 2025,
    section 3.1; InstructGPT, Eq. 2). Whitened, it is REINFORCE++'s advantage.

    Args:
      advantages: one per trajectory: the reward, possibly minus a baseline.
      penalties: one array per trajectory, one value per token; 0 on tokens that the policy did not write.
    """
    return [
        (advantage - np.cumsum(penalty[::-1], dtype=np.float64)[::-1]).astype(np.float32)
        for advantage, penalty in zip(advantages, penalties, strict=True)
    ]


def whiten(
    values: Sequence[Float[np.ndarray, "T"]],
    masks: Sequence[Bool[np.ndarray, "T"]],
    *,
    center: bool = True,
    epsilon: float = 1e-8,
) -> list[Float[np.ndarray, "T"]]:
    """(A - mean) / (std + epsilon), with mean and std over all policy tokens of the batch; 0 on all other tokens.

    Used by REINFORCE++ (Hu et al. 2025, section 3.1) and by most PPO implementations. Environment tokens enter neither
    mean nor std (released R-Search includes them).

    Args:
      values: one array per trajectory, one value per token.
      masks: True on the policy tokens of each trajectory.
      center: False divides without subtracting the mean.
      epsilon: added to the standard deviation.
    """
    chosen = np.concatenate([np.asarray(v, np.float64)[m] for v, m in zip(values, masks, strict=True)])
    mean, deviation = (chosen.mean(), chosen.std()) if len(chosen) else (0.0, 1.0)
    return [
        np.where(m, (v - (mean if center else 0.0)) / (deviation + epsilon), 0.0).astype(np.float32)
        for v, m in zip(values, masks, strict=True)
    ]


def low_spread(
    rewards: Float[np.ndarray, "N"], groups: Int[np.ndarray, "N"], threshold: float = 0.0
) -> Bool[np.ndarray, "N"]:
    """Mask of the trajectories whose group's rewards differ by at most `threshold`.

    A group with equal rewards gives no learning signal (DAPO, section 3.2). If rewards hardly differ, division by
    their small standard deviation gives the group as large advantages as any other group.
    """
    _, index = np.unique(groups, return_inverse=True)
    high = np.full(index.max(initial=-1) + 1, -np.inf)
    low = np.full_like(high, np.inf)
    np.maximum.at(high, index, rewards)
    np.minimum.at(low, index, rewards)
    return (high - low)[index] <= threshold + 1e-8  # equal sums of components may differ by rounding


def _group_statistics(
    rewards: Float[np.ndarray, "N"], groups: Int[np.ndarray, "N"]
) -> tuple[Int[np.ndarray, "N"], Int[np.ndarray, "G"], Float[np.ndarray, "G"]]:
    """Group index of each trajectory, and size and mean reward of each group."""
    _, index = np.unique(groups, return_inverse=True)
    count = np.bincount(index)
    return index, count, np.bincount(index, rewards) / count
