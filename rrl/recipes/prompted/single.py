"""Methods that search once or not at all: direct, CoT, naive RAG, RAG with CoT, SuRe."""

import re
from collections.abc import Sequence

from rrl.data.passages import Passage
from rrl.data.questions import Question, with_choices
from rrl.recipes.prompted.base import (
    ANSWER_INSTRUCTION,
    PromptedSettings,
    PromptedWorkflow,
    extract_answer,
    parse_list,
)
from rrl.recipes.rsearch import READER_TEMPLATE
from rrl.rewards.judge_prompts import parse_verdict
from rrl.rollout.workflow import Generated, Retrieve


def direct(question: Question, settings: PromptedSettings) -> PromptedWorkflow:
    """The model answers from what it knows, without reasoning."""
    said: Generated = yield settings.generate(
        f"Answer the question with the answer alone, without a sentence around it.\n\nQuestion: {with_choices(question)}\nAnswer:"
    )
    return said.text


def cot(question: Question, settings: PromptedSettings) -> PromptedWorkflow:
    """Chain of thought without demonstrations (Kojima et al., 2022), from what the model knows."""
    said: Generated = yield settings.generate(
        f"Answer the question. Think step by step first. {ANSWER_INSTRUCTION}\n\nQuestion: {with_choices(question)}"
    )
    return extract_answer(said)


def naive_rag(question: Question, settings: PromptedSettings) -> PromptedWorkflow:
    """One search with the question itself, then the answer from the passages (Lewis et al., 2020); R-Search's Table 5 prompt."""
    found = yield Retrieve(question.text)
    said: Generated = yield settings.generate(
        READER_TEMPLATE.format(evidence=settings.format_passages(found or ()), query=with_choices(question))
    )
    return said.text


def rag_cot(question: Question, settings: PromptedSettings) -> PromptedWorkflow:
    """One search with the question itself, then reasoning over the passages (R3-RAG's "RAG with CoT")."""
    found = yield Retrieve(question.text)
    return (yield from reasoned_answer(question, settings, found or ()))


def reasoned_answer(
    question: Question, settings: PromptedSettings, passages: Sequence[Passage]
) -> PromptedWorkflow:
    """Thinks over passages and answers: the last step of the methods that collect them."""
    said: Generated = yield settings.generate(
        "Answer the question with the help of the passages; where they say nothing, use what you know. Think step by step "
        f"first. {ANSWER_INSTRUCTION}\n\nPassages:\n{settings.format_passages(passages)}\n\nQuestion: {with_choices(question)}"
    )
    return extract_answer(said)


def sure(question: Question, settings: PromptedSettings, *, candidates: int = 2) -> PromptedWorkflow:
    """SuRe (Kim et al., 2024): candidate answers, a summary of the passages for each, and the best supported one.

    A summary that does not support its candidate costs it a point (validity); every two summaries are compared (ranking), and
    share the point where the model prefers neither. The most points win, the earlier candidate among equals.
    """
    found = yield Retrieve(question.text)
    context = f"Passages:\n{settings.format_passages(found or ())}\n\nQuestion: {with_choices(question)}"
    said: Generated = yield settings.generate(
        f"Give {candidates} different answers to the question that the passages may support, each on a line of its own and as "
        f"short as possible, without numbers before them.\n\n{context}"
    )
    answers = parse_list(said.text)[:candidates]
    if len(answers) < 2:
        return answers[0] if answers else ""
    summaries: list[Generated] = yield [
        settings.generate(
            f'Sum up what the passages say for the answer "{answer}" to the question, in at most five sentences.\n\n{context}'
        )
        for answer in answers
    ]
    supported: list[Generated] = yield [
        settings.generate(
            f'Does this summary support the answer "{answer}" to the question "{question.text}"? Reply with True or False.\n\n'
            f"Summary: {summary.text}"
        )
        for answer, summary in zip(answers, summaries)
    ]
    pairs = [(i, j) for i in range(len(answers)) for j in range(i)]
    preferred: list[Generated] = yield [
        settings.generate(
            f'Which summary is more informative for answering the question "{question.text}"? Reply with 1 or 2.\n\n'
            f"Summary 1: {summaries[j].text}\nSummary 2: {summaries[i].text}"
        )
        for i, j in pairs
    ]
    points = [float(parse_verdict(verdict.text) or 0.0) for verdict in supported]
    for (i, j), verdict in zip(pairs, preferred):
        chosen = re.match(r"\D*\b([12])\b(?!\s*(?:or|and)\b)", verdict.text)
        share = {"1": 0.0, "2": 1.0}[chosen[1]] if chosen else 0.5
        points[i] += share
        points[j] += 1.0 - share
    return answers[points.index(max(points))]
