"""From a measured difference to one of three words.

A difference has two sources of chance: which questions were asked, and which seeds were trained. Its interval reaches as far as
either says: that of Student's t over seeds, and that of the bootstrap over questions of the mean over seeds.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from rrl.eval.intervals import bootstrap, student

HOLDS, FAILS, UNTESTED, MISSING = "holds", "does not hold", "can't be tested at this size", "not measured yet"


@dataclasses.dataclass(frozen=True)
class ClaimEvidence:
    """What was measured for a claim; a difference above 0 is on the claim's side."""

    left: Sequence[float]
    """What the claim says is better, by seed."""
    right: Sequence[float]
    """What it is held against; one value where it has no seeds."""
    differences: Sequence[Float[np.ndarray, "Q"]]
    """By seed, of each question; of one element where the measure is none of single questions."""
    trained: bool = True
    """Whether seeds of training are part of it, so that a single one says nothing of their spread."""

    @property
    def questions(self) -> int:
        """0 where the measure is none of single questions."""
        return len(self.differences[0]) if len(self.differences[0]) > 1 else 0


@dataclasses.dataclass(frozen=True)
class ClaimVerdict:
    """What is said of a claim, and by what."""

    word: str
    difference: float
    low: float
    high: float
    reason: str = ""
    """Why it can't be tested."""


def judge_claim(evidence: ClaimEvidence, untestable: str = "", level: float = 0.95) -> ClaimVerdict:
    """Holds where the whole interval is above 0; does not where the mean is not; else the size is too small to tell.

    A difference on the claim's other side is "does not hold" however wide the interval. `untestable` is a reason known
    beforehand for which the measurement, whatever it says, is no test of the paper's claim.
    """
    means = [float(values.mean()) for values in evidence.differences]
    difference = float(np.mean(means))
    if not np.isfinite(difference):
        return ClaimVerdict(UNTESTED, difference, difference, difference, "a run has no right answer")
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
        word, reason = UNTESTED, "one seed says nothing of how far seeds differ"
    elif low <= 0:
        word, reason = UNTESTED, "the interval reaches 0"
    return ClaimVerdict(word, difference, low, high, reason)
