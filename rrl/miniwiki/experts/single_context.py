"""Demonstrations in one context to which observations are appended: R-Search, Search-R1, R1-Searcher, ReSearch."""

from rrl.miniwiki.experts.demonstration import (
    DemonstrationBuilder,
    DemonstrationSegments,
    RetrieveFn,
    demonstrate,
    think_and_search,
    thoughts,
)
from rrl.miniwiki.questions import MiniQuestion
from rrl.recipes.r1_searcher import R1Searcher
from rrl.recipes.research import ReSearch
from rrl.recipes.rsearch import RSearch
from rrl.recipes.search_r1 import SearchR1
from rrl.text.spans import in_tags


@demonstrate.register
def demonstrate_rsearch(recipe: RSearch, item: MiniQuestion, retrieve: RetrieveFn) -> DemonstrationSegments:
    """State the facts needed, search each hop, state what was read, quote evidence, answer."""
    builder = DemonstrationBuilder(recipe.environment, item, retrieve)
    needed, *read = thoughts(item.plan)
    for text, hop in zip([f"{needed}\n", *(f"{thought} " for thought in read)], item.plan.hops):
        builder.search(text, hop)
    closing = [read[-1]]
    if recipe.use_evidence:
        evidence = " ".join(dict.fromkeys(hop.sentence for hop in item.plan.hops))
        closing.append(in_tags("original_evidence", evidence))
    closing.append(in_tags(recipe.environment.answer, item.question.answers[0]))
    builder.segments.append("\n".join(closing))
    return builder.segments


@demonstrate.register
def demonstrate_search_r1(
    recipe: SearchR1, item: MiniQuestion, retrieve: RetrieveFn
) -> DemonstrationSegments:
    """Think of the facts needed, search each hop, think about what was read, answer."""
    return think_and_search(recipe.environment, item, retrieve, item.question.answers[0])


@demonstrate.register
def demonstrate_research(recipe: ReSearch, item: MiniQuestion, retrieve: RetrieveFn) -> DemonstrationSegments:
    r"""Think of the facts needed, search each hop, think about what was read, answer in \boxed{}."""
    return think_and_search(recipe.environment, item, retrieve, f"\\boxed{{ {item.question.answers[0]} }}")


@demonstrate.register
def demonstrate_r1_searcher(
    recipe: R1Searcher, item: MiniQuestion, retrieve: RetrieveFn
) -> DemonstrationSegments:
    """In one thought state the facts needed, search each hop and state what was read; then answer."""
    builder = DemonstrationBuilder(recipe.environment, item, retrieve)
    needed, *read = thoughts(item.plan)
    for thought, hop in zip([f" {needed}", *read], item.plan.hops):
        builder.search(f"{thought} ", hop)
    answer = in_tags(recipe.environment.answer, item.question.answers[0])
    builder.segments.append(f"{read[-1]} </think>\n{answer}")
    return builder.segments
