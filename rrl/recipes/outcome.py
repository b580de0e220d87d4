"""What recipes with outcome rewards share: advantages from total rewards, and metrics of answers."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from rrl.data.trajectory import Trajectory
from rrl.errors import one_of
from rrl.rl.advantages import ESTIMATORS
from rrl.rollout.protocol import Stream
from rrl.text.metrics import score_answer
from rrl.text.spans import count_tags


@dataclasses.dataclass(frozen=True)
class OutcomeRecipe:
    """Base class: advantages from total rewards, no judge, no excluded groups."""

    advantage: str = "grpo"
    """How rewards become advantages if there is no critic: a name in `rrl.rl.advantages.ESTIMATORS`."""

    def __post_init__(self) -> None:
        one_of(ESTIMATORS, self, "advantage")

    @property
    def needs_judge(self) -> bool:
        return False

    def excluded(self, trajectories: Sequence[Trajectory]) -> Bool[np.ndarray, "N"]:
        """Exclude nothing."""
        return np.zeros(len(trajectories), bool)

    def advantages(self, trajectories: Sequence[Trajectory]) -> Float[np.ndarray, "N"]:
        """Return the advantages of the estimator named by `advantage`."""
        rewards = np.array([t.rewards["total"] for t in trajectories], np.float64)
        return ESTIMATORS[self.advantage](rewards, np.array([t.group for t in trajectories]))


def answer_metrics(trajectory: Trajectory) -> dict[str, float]:
    """Return the metrics that every recipe reports.

    They are "em", "f1" and "cem" of the answer (exact match, token F1, cover exact match), and "searches", the number of
    successful searches.
    """
    scores = score_answer(trajectory.answer, trajectory.question.answers)
    return {**scores._asdict(), "searches": float(sum(not search.failed for search in trajectory.searches))}


def one_search_per_turn(response: Sequence[str], environment: Stream) -> bool:
    """Return whether every turn but the last makes one search, the last makes none, and no turn writes an observation tag."""
    # Pairs: how often the opening and the closing tag occur in a turn.
    searches = [count_tags(text, environment.search) for text in response]
    observations = [count_tags(text, environment.observation) for text in response]
    return searches == [(1, 1)] * (len(response) - 1) + [(0, 0)] and observations == [(0, 0)] * len(response)
