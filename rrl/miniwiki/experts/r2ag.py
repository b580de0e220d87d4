"""Demonstrations of R2AG. The policy grows a tree of queries and documents; each context is one expansion of that tree.

Some demonstrations simulate a retrieval miss.
"""

import zlib

from rrl.data.passages import Passage
from rrl.miniwiki.experts.demonstration import DemonstrationSegments, RetrieveFn, demonstrate
from rrl.miniwiki.questions import Hop, MiniQuestion
from rrl.recipes.r2ag import R2AG
from rrl.recipes.r2ag_rewards import BASE, NONE, PREDICTED, STOP_RETRIEVAL, THINK
from rrl.rollout.protocol import Restart
from rrl.text.normalize import title_key
from rrl.text.spans import in_tags


@demonstrate.register
def demonstrate_r2ag(recipe: R2AG, item: MiniQuestion, retrieve: RetrieveFn) -> DemonstrationSegments:
    """State what the documents say, ask for every fact that can be looked up next, and stop when no fact is missing.

    There are no predicted queries, because the facts of the built-in world are random.

    A share `recipe.shown_misses` of the demonstrations simulates a retrieval miss at the first search: one of several
    results is hidden; a single result is shown together with an irrelevant passage. The demonstration ends at a query whose
    first retrieved passage is not the required one.
    """
    segments: DemonstrationSegments = []
    documents: list[Passage] = []
    draw = zlib.crc32(item.question.id.encode())
    show_miss = draw % 1000 < 1000 * recipe.shown_misses
    while True:
        stated, wanted = _facts(item, {title_key(passage.title) for passage in documents})
        thought = "\n".join(filter(None, [f"To find : {item.plan.facts_text}", " ".join(stated)]))
        queries = [hop.query for hop in wanted] or [STOP_RETRIEVAL]
        tagged = [(THINK, thought), *((BASE, query) for query in queries), (PREDICTED, NONE)]
        segments.append("\n".join(in_tags(tag, text) for tag, text in tagged))
        results = [(hop, list(retrieve(hop.query))) for hop in wanted]
        hits = [
            bool(passages) and title_key(passages[0].title) == title_key(hop.title)
            for hop, passages in results
        ]
        if not results or not all(hits):
            return segments
        # Simulate a miss: hide one of several results, or show a single one with the second, irrelevant passage.
        if show_miss and len(results) > 1:
            results.pop(draw // 1000 % len(results))
            show_miss = False
        for _, passages in results:
            shown = passages[: 2 if show_miss else 1]
            documents += [passage for passage in shown if passage not in documents]
        show_miss = False
        segments.append(Restart(recipe.environment.prompt(item.question, documents)))


def _facts(item: MiniQuestion, titles: set[str]) -> tuple[list[str], list[Hop]]:
    """Return the known facts of a question, as sentences, and the facts to look up next.

    A fact is known if `titles` contains the title of the passage that states it.
    """
    hops, plan = item.plan.hops, item.plan
    # A comparison, which has a conclusion, has two branches of equal length; other plans have one branch.
    length = len(hops) // (2 if plan.conclusion else 1)
    stated, wanted = [], []
    for start in range(0, len(hops), length):
        for hop in hops[start : start + length]:
            if title_key(hop.title) not in titles:
                wanted.append(hop)
                break
            stated.append(f"The {hop.query} is {hop.value}.")
    if not wanted and plan.conclusion:
        stated.append(plan.conclusion)
    return stated, list({hop.query: hop for hop in wanted}.values())
