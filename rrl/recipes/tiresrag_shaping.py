"""What TIRESRAG-R1 adds to GRPO: the weight of auxiliary rewards, difficulty, consistency, and its filter of groups."""

import numpy as np
from jaxtyping import Bool, Float, Int

from rrl.errors import UserError

SCHEDULES = ("paper", "fixed", "linear", "fast")


def auxiliary_weight(step: int, steps: int, schedule: str = "paper") -> float:
    """a_t, the weight of rewards that are not the answer's (TIRESRAG-R1, section 4.3; variants of its appendices E and G.2).

    "paper" is 1 / (1 + exp((t - 0.9 T) / 10)): whole for most of the run, falling at its end. "fixed" is 1, "linear" falls
    from 1 to 0. "fast", which the paper draws (Figure 4) and does not print, is the paper's curve with its middle at 0.1 T.

    Args:
      step: t, updates made.
      steps: T, updates of the run; 0 where there is none, for which the weight is 1.
      schedule: one of SCHEDULES.
    """
    if schedule not in SCHEDULES:
        raise UserError(f"schedule={schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    if schedule == "fixed" or not steps:
        return 1.0
    if schedule == "linear":
        return 1.0 - step / steps
    middle = (0.9 if schedule == "paper" else 0.1) * steps
    with np.errstate(over="ignore"):  # long after the middle it is 0
        return float(1 / (1 + np.exp((step - middle) / 10)))


def difficulty_weight(
    mean_sufficient: Float[np.ndarray, "N"],
    *,
    low: float = 0.4,
    high: float = 1.5,
    middle: float = 0.75,
    steepness: float = 10.0,
) -> Float[np.ndarray, "N"]:
    """W = A + (B - A) / (1 + exp(k·(R - rho_0))): more weight where the group seldom found enough (TIRESRAG-R1, Eq. 6).

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
    """P = -lambda_p·A^S·A^T·A^A where that product is negative, else 0 (TIRESRAG-R1, Eq. 7, whose second A^T is A^S).

    It is never negative, and is subtracted: the final advantage is (A - P)·W (section 4.4).

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
    """True where the answers of a trajectory's group are all at most `low` or all at least `high`: TIRESRAG-R1's filter.

    A group stays iff its largest answer F1 is above `low` and its smallest below `high` (4.4; Algorithm 1, line
    14).
    """
    _, index = np.unique(groups, return_inverse=True)
    best = np.full(index.max(initial=-1) + 1, -np.inf)
    worst = np.full_like(best, np.inf)
    np.maximum.at(best, index, answers)
    np.minimum.at(worst, index, answers)
    return ((best <= low) | (worst >= high))[index]
