"""`demonstrate`, which each recipe implements, and the parts that its implementations share."""

import functools
from collections.abc import Callable, Sequence

from rrl.data.passages import Passage
from rrl.data.trajectory import Search
from rrl.errors import UserError
from rrl.miniwiki.questions import Hop, MiniQuestion, Plan
from rrl.recipes.base import Recipe
from rrl.recipes.catalogue import recipe_name
from rrl.rollout.protocol import Append, Episode, Restart, Stream
from rrl.text.spans import in_tags

RetrieveFn = Callable[[str], Sequence[Passage]]
"""Returns the passages of a query."""
DemonstrationSegments = list[str | Append | Restart]
"""A demonstration as a list of segments. A string is text of the expert, and an imitation target. An `Append` is text that the
environment adds to the context. A `Restart` replaces the context by a new prompt."""


@functools.singledispatch
def demonstrate(recipe: Recipe, item: MiniQuestion, retrieve: RetrieveFn) -> DemonstrationSegments:
    """Return a demonstration of a recipe's protocol on a question of the built-in world.

    The cold start (supervised fine-tuning before RL) has a loss on the strings only. An `Append` may therefore also hold
    text of the policy that must not be imitated, such as an early wrong answer.

    Args:
      recipe: its class decides which implementation runs.
      item: the question and the facts that lead to its answer.
      retrieve: returns the passages of a query.

    Raises UserError if the recipe's class has no implementation.
    """
    raise UserError(
        f"recipe.name={recipe_name(recipe)!r} has no scripted expert; register one with rrl.miniwiki.experts.demonstrate.register"
    )


def thoughts(plan: Plan) -> list[str]:
    """Return the expert's thoughts, one before each search and one before the answer.

    The first names the facts that the question needs. Each later one states the fact that the last search found.
    """
    read = [f"The {hop.query} is {hop.value}." for hop in plan.hops]
    if plan.conclusion:
        read[-1] = f"{read[-1]} {plan.conclusion}"
    return [f"To find : {plan.facts_text}", *read]


class DemonstrationBuilder:
    """Builds a demonstration in one context step by step: what the expert writes, and how the environment answers."""

    def __init__(self, environment: Stream, item: MiniQuestion, retrieve: RetrieveFn) -> None:
        self.segments: DemonstrationSegments = []
        """The result of `demonstrate`."""
        self._environment, self._retrieve = environment, retrieve
        self._episode = Episode(item.question)

    def search(self, text: str, hop: Hop) -> None:
        """Write `text` and the search for a fact, and append the environment's observation."""
        episode = self._episode
        self.segments.append(f"{text}{in_tags(self._environment.search, hop.query)}")
        passages = list(self._retrieve(hop.query))
        episode.searches.append(Search(episode.turn, hop.query, tuple(p.title for p in passages)))
        self.segments.append(self._environment.observe(episode, passages))
        episode.turn += 1


def think_and_search(
    environment: Stream, item: MiniQuestion, retrieve: RetrieveFn, answer: str
) -> DemonstrationSegments:
    """Return a demonstration of a thought and a search for each fact, then a thought and `answer`, all in tags."""
    builder = DemonstrationBuilder(environment, item, retrieve)
    *before, last = [in_tags("think", thought) for thought in thoughts(item.plan)]
    for thought, hop in zip(before, item.plan.hops, strict=True):
        builder.search(f"{thought}\n", hop)
    builder.segments.append(f"{last}\n{in_tags(environment.answer, answer)}")
    return builder.segments
