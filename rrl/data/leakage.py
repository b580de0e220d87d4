"""Find questions that two question files share, compared without case, punctuation and articles."""

import dataclasses
import re
import unicodedata
from collections.abc import Sequence

from rrl.data.questions import Question

_WORD = re.compile(r"[^\W_]+")
_ARTICLES = ("a", "an", "the")


@dataclasses.dataclass(frozen=True)
class Leak:
    """A held-out question that is also a training question."""

    train: Question
    held_out: Question

    @property
    def same_answer(self) -> bool:
        """Whether the two share a normalised gold answer, or neither has a gold answer."""
        train, held_out = (
            set(map(_normalized, question.answers)) for question in (self.train, self.held_out)
        )
        return not train.isdisjoint(held_out) or train == held_out


def shared_questions(train: Sequence[Question], held_out: Sequence[Question]) -> list[Leak]:
    """Return the held-out questions that are also training questions, in the order of `held_out`.

    Each is paired with the first training question of the same normalised text and the same answer, or with the first
    of the same text if no answer agrees. If no word remains, articles and punctuation count too.
    """
    by_text: dict[str, list[Question]] = {}
    for question in train:
        by_text.setdefault(_normalized(question.text), []).append(question)
    candidates = (
        [Leak(train_question, question) for train_question in by_text.get(_normalized(question.text), ())]
        for question in held_out
    )
    return [next((leak for leak in leaks if leak.same_answer), leaks[0]) for leaks in candidates if leaks]


def _normalized(text: str) -> str:
    """Return the words without case, punctuation and articles: "Well-known" is "well known", “it’s” is "it s"."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(word for word in _WORD.findall(plain) if word not in _ARTICLES) or plain.strip()
