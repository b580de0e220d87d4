"""Judges: one interface, three kinds behind it.

A frozen decoder run by the rollout engine (`ModelJudge` over `rrl.rewards.reader.Reader.answers`), a service behind an
OpenAI-compatible endpoint (the same over `rrl.rewards.endpoint.Endpoint.answers`), and an oracle where the data holds the
truth (`rrl.rewards.oracle.Oracle`).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from rrl.rewards.judge_card import JudgeCard
from rrl.rewards.judge_prompts import JudgePrompt
from rrl.text.chat import Prompt

AnswerFn = Callable[[Sequence[str | Prompt]], list[str]]
"""A model that is asked: prompts in, answers out, in their order."""


class Judge(Protocol):
    """Scores cases (see `rrl.rewards.judge_prompts`)."""

    def grade(self, cases: Sequence[JudgePrompt]) -> list[float | None]:
        """A score in 0..1 for each case, in their order; None where the judge said none."""


class ModelJudge:
    """Asks a model each case's own prompt, or what its card makes of it, and reads its answer."""

    def __init__(self, answers: AnswerFn, card: JudgeCard | None = None) -> None:
        self.answers = answers
        self.card = card or JudgeCard()

    def grade(self, cases: Sequence[JudgePrompt]) -> list[float | None]:
        """See `Judge`; no case costs nothing. Raises UserError for a kind of case that the model was not trained on."""
        said = self.answers([self.card.prompt_for(case) for case in cases]) if cases else []
        return [case.parse(text) for case, text in zip(cases, said, strict=True)]
