"""Turns a measured difference into a verdict: a claim holds, does not hold, or cannot be tested at this
size.

A difference has two sources of randomness: the questions and the training seeds. Its interval is the
wider of two on each side: Student's t over seeds, and the bootstrap over questions of the mean over
seeds.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from rrl.eval.intervals import bootstrap, student

HOLDS, FAILS, UNTESTED, MISSING = "holds", "does not hold", "can't be tested at this size", "not measured yet"


@dataclasses.dataclass(frozen=True)
class ClaimEvidence:
    """The measurements for a claim. A difference above 0 favours the claim."""

    left: Sequence[float]
    """Mean of the side that the claim favours, by seed."""
    right: Sequence[float]
    """Mean of the baseline, by seed; one value if the baseline has no seeds."""
    differences: Sequence[Float[np.ndarray, "Q"]]
    """For each seed, an array with the difference of each question. If the measure has no value per question, each array has one
    element."""
    trained: bool = True
    """Whether one of the compared policies is trained once per seed. A claim then holds only if there are at least two seeds."""

    @property
    def questions(self) -> int:
        """Number of questions; 0 if the measure has no value per question."""
        return len(self.differences[0]) if len(self.differences[0]) > 1 else 0


@dataclasses.dataclass(frozen=True)
class ClaimVerdict:
    """The verdict on a claim, with the difference and its interval."""

    word: str
    """`HOLDS`, `FAILS` or `UNTESTED`."""
    difference: float
    low: float
    high: float
    reason: str = ""
    """Why the claim cannot be tested."""


def judge_claim(evidence: ClaimEvidence, untestable: str = "", level: float = 0.95) -> ClaimVerdict:
    """Return the verdict on a claim.

    The first of these rules that applies decides:

    1. The claim cannot be tested if the difference is not finite, or if `untestable` is given. Tokens per right answer are
       infinite for a run without a right answer.
    2. It does not hold if the mean difference is 0 or below, however wide the interval.
    3. It cannot be tested if policies are trained over seeds (`ClaimEvidence.trained`) and there is only one seed, or if the
       interval includes 0.
    4. It holds: the whole interval is above 0.

    A verdict that the claim cannot be tested gives the reason.

    Args:
      evidence: the measurements.
      untestable: a reason, known beforehand, why the measurement is no test of the paper's claim; "":
        none.
      level: level of the interval.
    """
    means = [float(values.mean()) for values in evidence.differences]
    difference = float(np.mean(means))
    if not np.isfinite(difference):
        return ClaimVerdict(UNTESTED, difference, difference, difference, "a run has no correct answer")
    intervals = []
    if evidence.trained and len(means) > 1:
        intervals.append(student(means, level=level))
    if evidence.questions:
        intervals.append(bootstrap(np.mean(evidence.differences, axis=0), level=level))
    low = min((interval.low for interval in intervals), default=float("-inf"))
    high = max((interval.high for interval in intervals), default=float("inf"))
    word, reason = HOLDS, ""
    if untestable:
        word, reason = UNTESTED, untestable
    elif difference <= 0:
        word = FAILS
    elif evidence.trained and len(means) < 2:
        word, reason = UNTESTED, "one seed does not show how much seeds differ"
    elif low <= 0:
        word, reason = UNTESTED, "the interval includes 0"
    return ClaimVerdict(word, difference, low, high, reason)
