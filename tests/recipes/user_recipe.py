"""A user's recipe in a module outside `rrl`."""

import dataclasses

from rrl.recipes.base import Recipe
from rrl.recipes.rsearch import RSearch


@dataclasses.dataclass(frozen=True)
class Brief(RSearch):
    """R-Search with a bonus for short answers."""

    bonus: float = 0.1


class Incomplete(Recipe):
    """A recipe without prompt, tags and score."""


def short_answer(trajectory, question):
    """Return 1 for an answer of at most three words, else 0."""
    return float(len(trajectory.answer.split()) <= 3)
