"""Do two question files share questions? Compared by normalised text: case, punctuation and articles hide nothing."""

import dataclasses
import re
import unicodedata
from collections.abc import Sequence

from rrl.data.questions import Question

_WORD = re.compile(r"[^\W_]+")
_ARTICLES = ("a", "an", "the")


@dataclasses.dataclass(frozen=True)
class Leak:
    """A question of one file that stands in the other too."""

    train: Question
    held_out: Question

    @property
    def same_answer(self) -> bool:
        """Whether the two share a gold answer, normalised, or neither has one."""
        ours, theirs = (set(map(_normalized, question.answers)) for question in (self.train, self.held_out))
        return not ours.isdisjoint(theirs) or ours == theirs


def shared_questions(train: Sequence[Question], held_out: Sequence[Question]) -> list[Leak]:
    """Each held-out question whose text is also a training question's, in the order of `held_out`: with the first of these that
    has the same answer, or else with the first.

    Texts that normalise to nothing are compared as they are.
    """
    by_text: dict[str, list[Question]] = {}
    for question in train:
        by_text.setdefault(_normalized(question.text), []).append(question)
    leaks = ([Leak(known, q) for known in by_text.get(_normalized(q.text), ())] for q in held_out)
    return [next((leak for leak in of if leak.same_answer), of[0]) for of in leaks if of]


def _normalized(text: str) -> str:
    """Words without case and articles, whatever stands between them: "Well-known" is "well known", “it’s” is "it s"."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(word for word in _WORD.findall(plain) if word not in _ARTICLES) or plain.strip()
