"""The scripted expert of the built-in world: helpers for demonstrations in one context to which observations are appended."""

from rrl.data.trajectory import Search
from rrl.miniwiki.questions import Hop, MiniQuestion, Plan
from rrl.recipes.base import DemonstrationSegments, RetrieveFn
from rrl.rollout.protocol import Episode, Stream
from rrl.text.spans import in_tags


def thoughts(plan: Plan) -> list[str]:
    """Return the expert's thoughts, one before each search and one before the answer.

    The first names the facts that the question needs. Each later one states the fact that the last search found.
    """
    read = [f"The {hop.query} is {hop.value}." for hop in plan.hops]
    if plan.conclusion:
        read[-1] = f"{read[-1]} {plan.conclusion}"
    return [f"To find : {plan.facts}", *read]


class DemonstrationBuilder:
    """Builds a demonstration step by step: what the expert writes, and how the environment answers."""

    def __init__(self, environment: Stream, item: MiniQuestion, retrieve: RetrieveFn) -> None:
        self.segments: DemonstrationSegments = []
        """The result of a recipe's `demonstrate`."""
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
