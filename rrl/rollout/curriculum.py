"""What a run of reinforcement learning asks: which questions a step's rounds of rollouts get."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory


class Curriculum(Protocol):
    """Gives the questions of each step, and may go by what came of those before.

    What a step asks is a pure function of the arguments of `ask` and of `state`, which is kept with a checkpoint.
    """

    @property
    def state(self) -> Mapping[str, Any]:
        """What it has to remember, as JSON holds it."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state."""

    def select(self, step: int, number: int, count: int) -> list[Question]:
        """The questions of a step's round `number` (both counted from 0): one at least, `count` at most."""

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """Is told what was sampled from what it asked."""


class ShuffledQuestions:
    """Questions in random order, epoch after epoch; each round goes through all of them in an order of its own."""

    def __init__(self, questions: Sequence[Question], size: int, seed: int) -> None:
        """`size` questions make a step."""
        self.questions, self.size, self.seed = questions, size, seed

    @property
    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """There is nothing to remember."""

    def select(self, step: int, number: int, count: int) -> list[Question]:
        order = question_order(len(self.questions), self.size, self.seed, step, number)
        return [self.questions[i] for i in order[:count]]

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """There is nothing to learn."""


def question_order(count: int, size: int, seed: int, step: int, number: int = 0) -> np.ndarray:
    """Indices of the questions of a step's round: each epoch is a permutation, a pure function of its arguments."""
    size = min(size, count)
    per_epoch = count // size
    epoch, place = divmod(step, per_epoch)
    order = np.random.default_rng((seed, epoch, number) if number else (seed, epoch)).permutation(count)
    return order[place * size : (place + 1) * size]
