"""What recipes share that learn from every group, by the total of its rewards."""

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
    """Advantages from total rewards; no judge, and every group is learned from."""

    advantage: str = "grpo"
    """How rewards become advantages, where no critic gives them: see `rrl.rl.advantages.ESTIMATORS`."""

    def __post_init__(self) -> None:
        one_of(ESTIMATORS, self, "advantage")

    @property
    def needs_judge(self) -> bool:
        return False

    def excluded(self, trajectories: Sequence[Trajectory]) -> Bool[np.ndarray, "N"]:
        """None of them."""
        return np.zeros(len(trajectories), bool)

    def advantages(self, trajectories: Sequence[Trajectory]) -> Float[np.ndarray, "N"]:
        """What `advantage` names."""
        rewards = np.array([t.rewards["total"] for t in trajectories], np.float64)
        return ESTIMATORS[self.advantage](rewards, np.array([t.group for t in trajectories]))


def answer_metrics(trajectory: Trajectory) -> dict[str, float]:
    """What every recipe tells of a trajectory's answer: em, f1 and cem against the gold answers; and of its searches, how many
    came back."""
    found = score_answer(trajectory.answer, trajectory.question.answers)
    return {**found._asdict(), "searches": float(sum(not search.failed for search in trajectory.searches))}


def one_search_per_turn(response: Sequence[str], environment: Stream) -> bool:
    """Whether every turn but the last makes one search, the last makes none, and none writes what is the environment's."""
    searches = [count_tags(text, environment.search) for text in response]
    given = [count_tags(text, environment.observation) for text in response]
    return searches == [(1, 1)] * (len(response) - 1) + [(0, 0)] and given == [(0, 0)] * len(response)
