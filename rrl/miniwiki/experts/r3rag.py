"""Demonstrations of R3-RAG: one step per context."""

from rrl.data.trajectory import Search
from rrl.miniwiki.experts.demonstration import DemonstrationSegments, RetrieveFn, demonstrate
from rrl.miniwiki.questions import MiniQuestion
from rrl.recipes.r3rag import R3Rag
from rrl.recipes.r3rag_steps import Step
from rrl.rollout.protocol import Episode


@demonstrate.register
def demonstrate_r3rag(recipe: R3Rag, item: MiniQuestion, retrieve: RetrieveFn) -> DemonstrationSegments:
    """State the facts needed, search each fact in one step, state what was read, answer.

    The number of steps may exceed the environment's limit.
    """
    plan, episode = item.plan, Episode(item.question)
    segments: DemonstrationSegments = []
    analysis = f"To find : {plan.facts_text}"
    for hop in plan.hops:
        episode.policy_texts.append(Step(analysis, query=hop.query).to_text(episode.turn + 1))
        passages = tuple(retrieve(hop.query))
        episode.searches.append(Search.of(episode.turn, hop.query, passages))
        segments += [episode.policy_texts[-1], recipe.environment.next_context(episode)]
        episode.turn += 1
        analysis = f"The {hop.query} is {hop.value}."
    if plan.conclusion:
        analysis += f" {plan.conclusion}"
    segments.append(Step(analysis, answer=item.question.answers[0]).to_text(episode.turn + 1))
    return segments
