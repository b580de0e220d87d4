"""Do two question files share questions? Compared by normalised text, so that case, punctuation and articles don't hide it."""

import dataclasses
from collections.abc import Sequence

from rrl.data.questions import Question
from rrl.text.normalize import RULES

_RULE = RULES["triviaqa"]
"""Punctuation becomes a space, so that "well-known" and "well known" are the same."""


@dataclasses.dataclass(frozen=True)
class Leak:
    """A question of one file that stands in the other too."""

    train: Question
    held_out: Question

    @property
    def same_answer(self) -> bool:
        """Whether the two share a gold answer, normalised."""
        return bool(_normal(self.train.answers) & _normal(self.held_out.answers))


def shared_questions(train: Sequence[Question], held_out: Sequence[Question]) -> list[Leak]:
    """Each held-out question whose text is also a training question's, with the first such, in the order of `held_out`.

    Texts that normalise to nothing are compared with nothing.
    """
    texts = _RULE.normalize_all([question.text for question in train]) if train else []
    first: dict[str, Question] = {}
    for question, text in zip(train, texts):
        if text:
            first.setdefault(text, question)
    held = _RULE.normalize_all([question.text for question in held_out]) if held_out else []
    return [Leak(first[text], question) for question, text in zip(held_out, held) if text in first]


def _normal(answers: Sequence[str]) -> set[str]:
    return set(_RULE.normalize_all(answers)) if answers else set()
