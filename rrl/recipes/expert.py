"""The scripted expert of the built-in world: what the demonstrations of all protocols with one growing context share."""

from rrl.data.trajectory import Search
from rrl.miniwiki.questions import Hop, MiniQuestion, Plan
from rrl.recipes.base import DemonstrationSegments, RetrieveFn
from rrl.rollout.protocol import Episode, Stream
from rrl.text.spans import boxed


def thoughts(plan: Plan) -> list[str]:
    """What the expert thinks before each search, and before it answers: what is needed, then each fact as it was read."""
    read = [f"The {hop.query} is {hop.value}." for hop in plan.hops]
    if plan.conclusion:
        read[-1] = f"{read[-1]} {plan.conclusion}"
    return [f"To find : {plan.facts}", *read]


class DemonstrationBuilder:
    """An episode in the making: the expert's own words and the environment's answers to them, in turn."""

    def __init__(self, environment: Stream, item: MiniQuestion, retrieve: RetrieveFn) -> None:
        self.segments: DemonstrationSegments = []
        """What a recipe's `demonstrate` returns."""
        self._environment, self._retrieve = environment, retrieve
        self._episode = Episode(item.question)

    def search(self, words: str, hop: Hop) -> None:
        """Says `words`, searches a fact, and reads what comes back."""
        episode = self._episode
        self.segments.append(f"{words}{boxed(self._environment.search, hop.query)}")
        passages = list(self._retrieve(hop.query))
        episode.searches.append(Search(episode.turn, hop.query, tuple(p.title for p in passages)))
        self.segments.append(self._environment.observe(episode, passages))
        episode.turn += 1


def think_and_search(
    environment: Stream, item: MiniQuestion, retrieve: RetrieveFn, answer: str
) -> DemonstrationSegments:
    """Boxes alone, one after the other: thought and search for each fact, at last thought and `answer` in its box."""
    told = DemonstrationBuilder(environment, item, retrieve)
    *before, last = [boxed("think", thought) for thought in thoughts(item.plan)]
    for thought, hop in zip(before, item.plan.hops, strict=True):
        told.search(f"{thought}\n", hop)
    told.segments.append(f"{last}\n{boxed(environment.answer, answer)}")
    return told.segments
