"""The judge prompts of the papers: each class has the prompt for one judgement, and parses the judge's reply to it.

The texts of the prompts are in `rrl.rewards.judge_instructions`.

`parse` returns a score in 0..1, or None if the reply contains no score. Callers report how often None occurs. They count it as 0;
for `ShortAnswer` they use the score of the whole answer instead.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Protocol

from rrl.data.passages import Passage, render
from rrl.data.questions import Question, with_choices
from rrl.data.trajectory import ENVIRONMENT, POLICY
from rrl.rewards.judge_instructions import (
    CORRECTNESS_TEMPLATE,
    ERROR_ANALYSIS_TEMPLATE,
    ERROR_ASPECTS,
    RELEVANCE_SYSTEM,
    SUFFICIENCY_SYSTEM,
    THINKING_SYSTEM,
    VALIDATION_SYSTEM,
)
from rrl.rewards.reply_parsing import parse_tenths, parse_verdict
from rrl.rewards.transcript import Transcript
from rrl.text.chat import Prompt, after_thought
from rrl.text.metrics import AnswerScores, score_answer
from rrl.text.normalize import RRL_RULE, AnswerRule
from rrl.text.short_answers import EXTRACT_TEMPLATE, listed_answers


class JudgePrompt(Protocol):
    """One judgement that a judge is asked for."""

    @property
    def question(self) -> Question:
        """The question that the judged answer or reasoning belongs to."""

    @property
    def prompt(self) -> Prompt:
        """The prompt for a language model."""

    def parse(self, text: str) -> float | None:
        """Return the score in 0..1 that a model's reply contains; None if it contains none."""


@dataclasses.dataclass(frozen=True)
class Sufficiency:
    """Can the gold answer be inferred from the reasoning and the documents? 0 or 1 (TIRESRAG-R1, Eq. 2)."""

    question: Question
    transcript: Transcript

    @property
    def prompt(self) -> Prompt:
        return Prompt(
            f"### QUESTION\n{_shown(self.question)}\n\n### ANSWER\n{gold_text(self.question)}\n\n### References\n",
            self.transcript.text,
            system=SUFFICIENCY_SYSTEM,
        )

    def parse(self, text: str) -> float | None:
        # The label 0, 1, true or false after "Sufficient Context ...:", but not the start of another number (10, 0.5).
        labels = re.findall(
            r"sufficient[ _]context[^:\n]{0,40}:[\s\"'*]*(?:([01])(?:\.0+)?(?![\d.]*\d)|(true|false)\b)",
            after_thought(text).lower(),
        )
        return float(labels[-1][0] or labels[-1][1] == "true") if labels else None


@dataclasses.dataclass(frozen=True)
class Thinking:
    """How good is the reasoning, regardless of its answer? A score in tenths (TIRESRAG-R1, Eq. 3)."""

    question: Question
    transcript: Transcript

    @property
    def prompt(self) -> Prompt:
        return Prompt(
            "### CONTEXT\n",
            self.transcript.text_of(ENVIRONMENT),
            f"\n\n### QUESTION\n{_shown(self.question)}\n\n### MODEL THINKING PROCESS\n{self.transcript.text_of(POLICY)}",
            system=THINKING_SYSTEM,
        )

    def parse(self, text: str) -> float | None:
        return parse_tenths(text)


@dataclasses.dataclass(frozen=True)
class Correctness:
    """Is the predicted answer correct? 0 or 1 (TIRESRAG-R1, Figure 13)."""

    question: Question
    predicted: str

    @property
    def prompt(self) -> Prompt:
        text = CORRECTNESS_TEMPLATE.format(
            question=_shown(self.question), reference=gold_text(self.question), prediction=self.predicted
        )
        return Prompt(text)

    def parse(self, text: str) -> float | None:
        # The figure asks for True or False; its caption in appendix J speaks of yes and no.
        return parse_verdict(text)


@dataclasses.dataclass(frozen=True)
class Validation:
    """Is the predicted answer correct? 0 or 1, with R2AG's prompt (Figure A.4)."""

    question: Question
    predicted: str

    @property
    def prompt(self) -> Prompt:
        text = f'Query: "{_shown(self.question)}"\nLabel: "{gold_text(self.question)}"\nStudent\'s Answer: "{self.predicted}"'
        return Prompt(text, system=VALIDATION_SYSTEM)

    def parse(self, text: str) -> float | None:
        labels = re.findall(r"validation\W*(correct|wrong)\b", after_thought(text).lower())
        return float(labels[-1] == "correct") if labels else None


@dataclasses.dataclass(frozen=True)
class Relevance:
    """How relevant are the documents of a step? A score in tenths (R3-RAG, Eq. 3)."""

    question: Question
    passages: tuple[Passage, ...]

    @property
    def prompt(self) -> Prompt:
        after = "\n\nScore:"
        return Prompt(
            f"Question: {_shown(self.question)}\n\nDocuments:\n",
            render(self.passages),
            after,
            RELEVANCE_SYSTEM,
        )

    def parse(self, text: str) -> float | None:
        return parse_tenths(text)


@dataclasses.dataclass(frozen=True)
class ShortAnswer:
    """How good is a long answer? A metric of its short answers, which the judge extracts (R3-RAG, 4.1).

    The score is the maximum over the short answers.
    """

    question: Question
    predicted: str
    metric: str
    """A field of `AnswerScores`: "em", "f1" or "cem". The prompt does not depend on it."""
    rule: AnswerRule = RRL_RULE
    """How answers are compared."""

    @property
    def prompt(self) -> Prompt:
        return Prompt(EXTRACT_TEMPLATE.format(question=_shown(self.question), answer=self.predicted))

    def parse(self, text: str) -> float | None:
        answers = listed_answers(after_thought(text))
        return None if answers is None else self.score(answers)

    def score(self, answers: Sequence[str]) -> float:
        """Return the metric of these short answers."""
        scores: AnswerScores = score_answer(answers, self.question.answers, self.rule)
        return float(getattr(scores, self.metric))


@dataclasses.dataclass(frozen=True)
class ErrorAnalysis:
    """One question about the cause of a wrong answer: 0 or 1 (for the error types of TIRESRAG-R1, Table 2)."""

    question: Question
    transcript: Transcript
    predicted: str
    aspect: str
    """One of ERROR_ASPECTS."""
    last_titles: tuple[str, ...] = ()
    """Titles of the passages of the last search."""

    @property
    def prompt(self) -> Prompt:
        opening = ERROR_ANALYSIS_TEMPLATE.format(
            question=_shown(self.question), gold=gold_text(self.question), predicted=self.predicted
        )
        return Prompt(
            opening, self.transcript.text, f"\n\n{ERROR_ASPECTS[self.aspect]} Answer True or False."
        )

    def parse(self, text: str) -> float | None:
        return parse_verdict(text)


def _shown(question: Question) -> str:
    """Return the question as a judge reads it: with its choices, which letters of answers refer to."""
    return with_choices(question, instruct=False)


def gold_text(question: Question) -> str:
    """Return the gold answers as a judge reads them."""
    return " or ".join(question.answers)
