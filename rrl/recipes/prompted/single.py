"""Methods with at most one search: direct, CoT, naive RAG, RAG with CoT, SuRe."""

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
from rrl.rewards.reply_parsing import parse_verdict
from rrl.rollout.workflow import Generated, Retrieve


def direct(question: Question, settings: PromptedSettings) -> PromptedWorkflow:
    """Direct answer from the model's own knowledge, without reasoning."""
    output: Generated = yield settings.generate(
        f"Answer the question with the answer alone, without a sentence around it.\n\nQuestion: {with_choices(question)}\nAnswer:"
    )
    return output.text


def cot(question: Question, settings: PromptedSettings) -> PromptedWorkflow:
    """Zero-shot chain of thought from the model's own knowledge (Kojima et al., 2022)."""
    output: Generated = yield settings.generate(
        f"Answer the question. Think step by step first. {ANSWER_INSTRUCTION}\n\nQuestion: {with_choices(question)}"
    )
    return extract_answer(output)


def naive_rag(question: Question, settings: PromptedSettings) -> PromptedWorkflow:
    """One search with the question, then an answer from the passages (Lewis et al., 2020). The prompt is R-Search's Table 5."""
    hits = yield Retrieve(question.text)
    output: Generated = yield settings.generate(
        READER_TEMPLATE.format(evidence=settings.format_passages(hits or ()), query=with_choices(question))
    )
    return output.text


def rag_cot(question: Question, settings: PromptedSettings) -> PromptedWorkflow:
    """One search with the question, then reasoning over the passages (R3-RAG's "RAG with CoT")."""
    hits = yield Retrieve(question.text)
    return (yield from reasoned_answer(question, settings, hits or ()))


def reasoned_answer(
    question: Question, settings: PromptedSettings, passages: Sequence[Passage]
) -> PromptedWorkflow:
    """Reason over passages and answer: the last step of methods that collect passages."""
    output: Generated = yield settings.generate(
        "Answer the question with the help of the passages; where they say nothing, use what you know. Think step by step "
        f"first. {ANSWER_INSTRUCTION}\n\nPassages:\n{settings.format_passages(passages)}\n\nQuestion: {with_choices(question)}"
    )
    return extract_answer(output)


def sure(question: Question, settings: PromptedSettings, *, candidates: int = 2) -> PromptedWorkflow:
    """SuRe (Kim et al., 2024): candidate answers, a summary of the passages for each, and the best supported candidate.

    A candidate gets one point if its summary supports it (validity). Each pair of summaries is compared for one more point
    (ranking), which both share if the model prefers neither. Most points win; the earlier candidate wins a tie.
    """
    hits = yield Retrieve(question.text)
    context = f"Passages:\n{settings.format_passages(hits or ())}\n\nQuestion: {with_choices(question)}"
    output: Generated = yield settings.generate(
        f"Give {candidates} different answers to the question that the passages may support, each on a line of its own and as "
        f"short as possible, without numbers before them.\n\n{context}"
    )
    answers = parse_list(output.text)[:candidates]
    if len(answers) < 2:
        return answers[0] if answers else ""
    summaries: list[Generated] = yield [
        settings.generate(
            f'Sum up what the passages say for the answer "{answer}" to the question, in at most five sentences.\n\n{context}'
        )
        for answer in answers
    ]
    shown = with_choices(question, instruct=False)
    supported: list[Generated] = yield [
        settings.generate(
            f'Does this summary support the answer "{answer}" to the question "{shown}"? Reply with True or False.\n\n'
            f"Summary: {summary.text}"
        )
        for answer, summary in zip(answers, summaries)
    ]
    pairs = [(i, j) for i in range(len(answers)) for j in range(i)]
    preferred: list[Generated] = yield [
        settings.generate(
            f'Which summary is more informative for answering the question "{shown}"? Reply with 1 or 2.\n\n'
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
