"""Curricula: which questions each round of rollouts of a training step gets."""

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
        """Return at least one and at most `count` questions for round `number` of `step` (both from 0)."""

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """Update the state with the trajectories of the selected questions."""


class ShuffledQuestions:
    """All questions in random order, epoch after epoch. Each round of a step has its own order."""

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
    """Return the indices of the questions of round `number` of `step`. Each epoch is a permutation of all `count` questions,
    determined by the arguments alone."""
    size = min(size, count)
    per_epoch = count // size
    epoch, place = divmod(step, per_epoch)
    order = np.random.default_rng((seed, epoch, number) if number else (seed, epoch)).permutation(count)
    return order[place * size : (place + 1) * size]
