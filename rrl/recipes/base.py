"""What a recipe is: everything in which one paper differs from another."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float

from rrl.data.miniwiki.questions import MiniQuestion
from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.rollout.protocol import Append, Environment
from rrl.rollout.trajectory import Trajectory

Answers = Callable[[Sequence[str]], list[str]]
"""A reader or judge: prompts in, answers out."""

Retrieve = Callable[[str], Sequence[Passage]]


class Recipe(Protocol):
    """One paper: its prompt, its environment, its rewards, its advantages."""

    @property
    def environment(self) -> Environment:
        """The protocol between policy and tools."""

    @property
    def tags(self) -> dict[str, str]:
        """Tags that the policy writes, by what they hold (search, evidence, answer): for readers of trajectories."""

    def prompt(self, question: Question) -> str:
        """The user's turn that opens an episode."""

    def score(self, trajectories: Sequence[Trajectory], reader: Answers | None) -> None:
        """Fills `rewards` (by component, and "total"), `metrics`, `answer` and `evidence` of each trajectory."""

    def advantages(self, trajectories: Sequence[Trajectory]) -> Float[np.ndarray, "N"]:
        """One advantage a trajectory, from `rewards`; these are all that a step learns from, at least one."""

    def demonstrate(self, item: MiniQuestion, retrieve: Retrieve) -> list[str | Append]:
        """The scripted expert in the built-in world: its own words, and what the environment answers, in turn."""
