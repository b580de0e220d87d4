"""Curricula: the questions of each training step. A step may run several rounds of rollouts, each with its own questions."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory


class Curriculum(Protocol):
    """Selects the questions of each step; may depend on earlier trajectories.

    The selection is a pure function of the arguments of `select` and of `state`, which checkpoints hold.
    """

    @property
    def state(self) -> Mapping[str, Any]:
        """The state, of JSON types."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state` of a checkpoint."""

    def select(self, step: int, number: int, count: int) -> list[Question]:
        """Return at least one and at most `count` questions for round `number` of `step`. Both indices start at 0."""

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """Update the state with the trajectories of the selected questions."""


class ShuffledQuestions:
    """All questions in random order, epoch after epoch (`question_order`). Each round of a step has its own order."""

    def __init__(self, questions: Sequence[Question], size: int, seed: int) -> None:
        """`size` is the number of questions per step."""
        self.questions, self.size, self.seed = questions, size, seed

    @property
    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the order has no state."""

    def select(self, step: int, number: int, count: int) -> list[Question]:
        order = question_order(len(self.questions), self.size, self.seed, step, number)
        return [self.questions[i] for i in order[:count]]

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """Do nothing: the order does not depend on trajectories."""


def question_order(count: int, size: int, seed: int, step: int, number: int = 0) -> np.ndarray:
    """Return the indices of the questions of a round of rollouts.

    Each epoch is a new permutation of all questions. Its last `count % size` questions are skipped: they fill no step. The
    result depends on the arguments alone.

    Args:
      count: number of all questions.
      size: questions per step.
      seed: seed of the permutations.
      step: index of the training step.
      number: index of the round within the step.
    """
    size = min(size, count)
    per_epoch = count // size
    epoch, step_in_epoch = divmod(step, per_epoch)
    order = np.random.default_rng((seed, epoch, number) if number else (seed, epoch)).permutation(count)
    return order[step_in_epoch * size : (step_in_epoch + 1) * size]
