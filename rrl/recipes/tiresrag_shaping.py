"""What TIRESRAG-R1 adds to GRPO: weight of auxiliary rewards, difficulty weight, consistency penalty and group filter."""

import numpy as np
from jaxtyping import Bool, Float, Int

from rrl.errors import UserError

SCHEDULES = ("paper", "fixed", "linear", "fast")
"""Schedules of `auxiliary_weight`."""


def auxiliary_weight(step: int, steps: int, schedule: str = "paper") -> float:
    """Return a_t, the weight of the auxiliary rewards (TIRESRAG-R1, section 4.3; variants of appendices E and G.2).

    "paper" is 1 / (1 + exp((t - 0.9 T) / 10)): near 1 for most of the run, then it falls. "fixed" is 1. "linear" falls from
    1 to 0. "fast" is the paper's curve with its middle at 0.1 T; Figure 4 plots it, but the paper prints no formula.

    Args:
      step: t, updates made.
      steps: T, updates of the run; 0 outside training, where the weight is 1.
      schedule: one of SCHEDULES.

    Raises UserError for an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise UserError(f"schedule={schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    if schedule == "fixed" or not steps:
        return 1.0
    if schedule == "linear":
        return 1.0 - step / steps
    middle = (0.9 if schedule == "paper" else 0.1) * steps
    with np.errstate(over="ignore"):  # far after the middle the weight is 0
        return float(1 / (1 + np.exp((step - middle) / 10)))


def difficulty_weight(
    mean_sufficient: Float[np.ndarray, "N"],
    *,
    low: float = 0.4,
    high: float = 1.5,
    middle: float = 0.75,
    steepness: float = 10.0,
) -> Float[np.ndarray, "N"]:
    """Return W = A + (B - A) / (1 + exp(k·(R - rho_0))): harder questions weigh more (TIRESRAG-R1, Eq. 6).

    Args:
      mean_sufficient: R, the mean sufficient reward of the trajectory's group, in 0..1.
      low: A.
      high: B.
      middle: rho_0.
      steepness: k.
    """
    return low + (high - low) / (1 + np.exp(steepness * (np.asarray(mean_sufficient) - middle)))


def consistency_penalty(
    sufficient: Float[np.ndarray, "N"],
    thinking: Float[np.ndarray, "N"],
    answer: Float[np.ndarray, "N"],
    *,
    weight: float = 0.1,
) -> Float[np.ndarray, "N"]:
    """Return P = -lambda_p·A^S·A^T·A^A if that product is negative, else 0 (TIRESRAG-R1, Eq. 7).

    The second A^T in the printed equation is a slip for A^S. P is at least 0 and is subtracted: the final advantage is
    (A - P)·W (section 4.4).

    Args:
      sufficient: group-normalised sufficient rewards.
      thinking: group-normalised thinking rewards.
      answer: group-normalised answer rewards.
      weight: lambda_p.
    """
    product = np.asarray(sufficient) * thinking * answer
    return weight * np.maximum(-product, 0.0)


def saturated(
    answers: Float[np.ndarray, "N"], groups: Int[np.ndarray, "N"], low: float = 0.1, high: float = 0.9
) -> Bool[np.ndarray, "N"]:
    """Return which trajectories belong to saturated groups: TIRESRAG-R1's group filter (4.4; Algorithm 1, line 14).

    A group stays only if its largest answer F1 is above `low` and its smallest is below `high`.

    Args:
      answers: answer F1 of each trajectory.
      groups: group of each trajectory.
      low: threshold of the largest F1 in a group.
      high: threshold of the smallest F1 in a group.
    """
    _, index = np.unique(groups, return_inverse=True)
    best = np.full(index.max(initial=-1) + 1, -np.inf)
    worst = np.full_like(best, np.inf)
    np.maximum.at(best, index, answers)
    np.minimum.at(worst, index, answers)
    return ((best <= low) | (worst >= high))[index]
