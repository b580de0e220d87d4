"""The `Judge` interface, and the judge that asks a language model.

There are three kinds of judge: a frozen decoder in the rollout engine (`ModelJudge` with
`rrl.rewards.reader.Reader.answers`), a service behind an OpenAI-compatible endpoint (`ModelJudge` with
`rrl.rewards.endpoint.Endpoint.answers`), and an oracle that reads the gold passages (`rrl.rewards.oracle.Oracle`).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from rrl.rewards.judge_card import JudgeCard
from rrl.rewards.judge_prompts import JudgePrompt
from rrl.text.chat import Prompt

AnswerFn = Callable[[Sequence[str | Prompt]], list[str]]
"""A model as a function: prompts -> answers, in the same order."""


class Judge(Protocol):
    """Scores judge prompts (see `rrl.rewards.judge_prompts`)."""

    def grade(self, prompts: Sequence[JudgePrompt]) -> list[float | None]:
        """Return a score in 0..1 for each prompt, in order; None if the judge's reply contains no score."""


class ModelJudge:
    """Sends each prompt to a model, with or without instructions as the model's card says, and parses its reply."""

    def __init__(self, answers: AnswerFn, card: JudgeCard | None = None) -> None:
        self.answers = answers
        self.card = card or JudgeCard()

    def grade(self, prompts: Sequence[JudgePrompt]) -> list[float | None]:
        """See `Judge`. Raises UserError for a kind of prompt that the model was not trained on."""
        replies = self.answers([self.card.prompt_for(prompt) for prompt in prompts]) if prompts else []
        return [prompt.parse(reply) for prompt, reply in zip(prompts, replies, strict=True)]
