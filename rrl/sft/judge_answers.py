"""The answers that a judge should write to prompts about the built-in world: reasons, then the oracle's score."""

import dataclasses

from rrl.data.questions import Question
from rrl.miniwiki import MiniQuestion
from rrl.rewards.judge_prompts import (
    Correctness,
    JudgePrompt,
    Relevance,
    Sufficiency,
    Thinking,
    Transcript,
    gold_text,
)
from rrl.rewards.oracle import chain_coverage, groundedness, word_grounding

MAX_LISTED_WORDS = 6
"""A judge's reasons list at most this many ungrounded words."""


def answer_with_reasons(prompt: JudgePrompt, item: MiniQuestion, score: float) -> str:
    """Return the answer that the judge should write to a prompt about `item`."""
    match prompt:
        case Sufficiency(_, transcript):
            verdict = f'{{"Sufficient Context": {score:.0f}}}'
            return _with_reasons(_sufficiency_reasons(item, transcript), verdict)
        case Thinking(question, transcript):
            return _with_reasons(_thinking_reasons(question, transcript), f"{score:.1f}")
        case Relevance(question, passages):
            titles = {passage.title for passage in passages}
            retrieved = [title for title in question.gold if title in titles]
            return _with_reasons(
                f"{item.plan.facts_text} : {' ; '.join(retrieved) or 'nothing'}", f"{score:.1f}"
            )
        case Correctness(question, predicted):
            # The reasons put both answers next to each other, where they are easier to compare.
            return _with_reasons(f"{gold_text(question)} : {predicted}", str(score > 0))
    raise TypeError(f"no reasons are known for {type(prompt).__name__}")


def _with_reasons(reasons: str, verdict: str) -> str:
    return f"<think> {reasons} </think> {verdict}"


def _sufficiency_reasons(item: MiniQuestion, transcript: Transcript) -> str:
    """Return the reasons of a sufficiency score.

    They are the facts that the question needs, up to the first whose passage was not retrieved.
    """
    facts = []
    for hop in item.plan.hops:
        known = hop.title in transcript.titles
        facts.append(f"The {hop.query} is {hop.value if known else 'unknown'}.")
        if not known:
            break
    return " ".join(facts)


def _thinking_reasons(question: Question, transcript: Transcript) -> str:
    """Return the reasons of a thinking score.

    They are the gold passages that the thinking names and the words that no passage supports, with the score of each part.
    """
    named = [
        title if chain_coverage(dataclasses.replace(question, gold=(title,)), transcript) else "unknown"
        for title in question.gold
    ]
    ungrounded = list(
        dict.fromkeys(word for word, grounded in word_grounding(question, transcript) if not grounded)
    )[:MAX_LISTED_WORDS]
    shares = f"{chain_coverage(question, transcript):.1f}", f"{groundedness(question, transcript):.1f}"
    return (
        f"{' ; '.join(named)} : {shares[0]}. Not found : {', '.join(ungrounded) or 'nothing'} : {shares[1]}."
    )
