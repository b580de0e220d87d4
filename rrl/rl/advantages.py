"""Advantages without a critic: pure functions on the host, one number a trajectory or one a token."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

Estimator = Callable[[Float[np.ndarray, "N"], Int[np.ndarray, "N"]], Float[np.ndarray, "N"]]
"""From the rewards of the trajectories that are learned from, and their groups, to one advantage a trajectory."""


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
      scale: False leaves the division out (Dr. GRPO: Liu et al. 2025, section 3.2).
    """
    rewards = np.asarray(rewards, np.float64)
    index, count, mean = _of_groups(rewards, groups)
    centred = rewards - mean[index]
    if scale:
        freedom = np.maximum(count - 1, 1) if unbiased else count
        deviation = np.sqrt(np.bincount(index, centred**2) / freedom)
        centred = centred / (deviation[index] + epsilon)
    return centred.astype(np.float32)


def leave_one_out(rewards: Float[np.ndarray, "N"], groups: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """r - mean of the others of its group: RLOO (Ahmadian et al. 2024, Eq. 8); 0 in a group of one, which has no others."""
    rewards = np.asarray(rewards, np.float64)
    index, count, mean = _of_groups(rewards, groups)
    return ((rewards - mean[index]) * (count / np.maximum(count - 1, 1))[index]).astype(np.float32)


def batch_normalize(
    rewards: Float[np.ndarray, "N"],
    groups: Int[np.ndarray, "N"],
    *,
    baseline: bool = False,
    epsilon: float = 1e-8,
) -> Float[np.ndarray, "N"]:
    """(r - mean of the batch) / (std of the batch + epsilon): REINFORCE++'s normalisation over the whole batch, population std
    (Hu et al. 2025, section 3.1; the alternative to GRPO in TIRESRAG-R1, Table 4 and appendix D).

    Every trajectory counts once. Where the KL is part of the reward, tokens of a trajectory differ: then that paper whitens
    rewards less KL over all tokens (`subtract_penalty_to_go`, `whiten`), of rewards that nothing normalised before ("reward").

    Args:
      rewards: one a trajectory.
      groups: samples of one question share a number; read with a baseline only.
      baseline: subtract the mean of the group first: the group-baseline form ("REINFORCE++-baseline").
      epsilon: added to the standard deviation.
    """
    rewards = np.asarray(rewards, np.float64)
    if baseline:
        index, _, mean = _of_groups(rewards, groups)
        rewards = rewards - mean[index]
    return ((rewards - rewards.mean()) / (rewards.std() + epsilon)).astype(np.float32)


def raw_reward(rewards: Float[np.ndarray, "N"], groups: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """r, with no baseline: what REINFORCE++ starts from where advantages are whitened token by token."""
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
"""What a recipe's field `advantage` may name."""
GROUP_RELATIVE = ("grpo", "grpo_population", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Those that compare the samples of a question with each other: of a single one they say 0."""


def subtract_penalty_to_go(
    advantages: Float[np.ndarray, "N"], penalties: Sequence[Float[np.ndarray, "T"]]
) -> list[Float[np.ndarray, "T"]]:
    """A - (sum of the penalties from the token to the end), for every token of every trajectory.

    With penalties beta·k1 this is the undiscounted return of a reward that the KL is part of (REINFORCE++, Hu et al. 2025,
    section 3.1; InstructGPT, Eq. 2); whitened, it is REINFORCE++'s advantage.

    Args:
      advantages: one a trajectory: the reward, or the reward less a baseline that is the same for all its tokens.
      penalties: of the tokens of each trajectory; 0 where the policy did not write.
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
    """(A - mean) / (std + epsilon) with mean and std over the policy tokens of the whole batch; 0 on all other tokens.

    REINFORCE++ (Hu et al. 2025, section 3.1) and PPO as commonly run. Environment tokens enter neither moment (SPEC: the
    released R-Search forgets that).

    Args:
      values: one array a trajectory.
      masks: True on its policy tokens.
      center: False divides only.
    """
    chosen = np.concatenate([np.asarray(v, np.float64)[m] for v, m in zip(values, masks, strict=True)])
    mean, deviation = (chosen.mean(), chosen.std()) if len(chosen) else (0.0, 1.0)
    return [
        np.where(m, (v - (mean if center else 0.0)) / (deviation + epsilon), 0.0).astype(np.float32)
        for v, m in zip(values, masks, strict=True)
    ]


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


def _of_groups(
    rewards: Float[np.ndarray, "N"], groups: Int[np.ndarray, "N"]
) -> tuple[Int[np.ndarray, "N"], Int[np.ndarray, "G"], Float[np.ndarray, "G"]]:
    """The index of each trajectory's group, and the sizes and means of the groups."""
    _, index = np.unique(groups, return_inverse=True)
    count = np.bincount(index)
    return index, count, np.bincount(index, rewards) / count
