"""A judge that knows: for data whose questions name their gold passages, as the built-in world's and 2Wiki's do."""

import re
from collections.abc import Iterable, Sequence

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT
from rrl.errors import UserError
from rrl.rewards.judge_prompts import (
    Correctness,
    ErrorAnalysis,
    JudgePrompt,
    Relevance,
    ShortAnswer,
    Sufficiency,
    Thinking,
    Transcript,
    Validation,
)
from rrl.text.metrics import cover_exact_match
from rrl.text.normalize import normalize_answer, title_key

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_SENTENCE = re.compile(r"<[^<>]*>|[.!?:\n]+")


class Oracle:
    """Scores by the gold passages and answers of each question.

    - sufficiency: 1 where all gold passages were found;
    - thinking: the share of gold passages whose titles the reasoning names (is the chain whole?) times the share of the
      names and numbers in it that stood in the question or in what had been found before (is it grounded?), in tenths;
    - relevance: the share of the question's gold passages that the documents hold, in tenths, as the
      papers' judges say it (of four passages one is 0.2);
    - correctness: cover exact match;
    - short answers: the answer as it stands;
    - findings: something else was mistaken for what was asked where the last search found passages and none of them gold,
      thoughts are faithful where they are grounded, and reached the answer where they name it after the last search.
    """

    def grade(self, cases: Sequence[JudgePrompt]) -> list[float | None]:
        """See `rrl.rewards.judge.Judge`. Raises UserError for a question without gold passages where they are needed."""
        return [self._grade(case) for case in cases]

    def _grade(self, case: JudgePrompt) -> float:
        match case:
            case Sufficiency(question, told):
                return float(_keys(gold_titles(question)) <= _keys(told.titles))
            case Thinking(question, told):
                return round(chain_coverage(question, told) * groundedness(question, told), 1)
            case Relevance(question, passages):
                gold = _keys(gold_titles(question))
                return round(len(_keys(passage.title for passage in passages) & gold) / len(gold), 1)
            case Correctness(question, predicted) | Validation(question, predicted):
                return cover_exact_match(predicted, question.answers)
            case ShortAnswer():
                return case.score([case.predicted])
            case ErrorAnalysis(question, _, _, "mistaken", last):
                return float(bool(last) and not _keys(last) & _keys(gold_titles(question)))
            case ErrorAnalysis(question, told, _, "faithful"):
                return float(groundedness(question, told) == 1.0)
            case ErrorAnalysis(question, told, _, "reached"):
                return cover_exact_match(final_thought(told), question.answers)
        raise TypeError(f"the oracle knows nothing of {type(case).__name__}")


def _keys(titles: Iterable[str]) -> set[str]:
    return {title_key(title) for title in titles}


def gold_titles(question: Question) -> tuple[str, ...]:
    """Titles of the gold passages. Raises UserError where the data does not name them."""
    if not question.gold:
        raise UserError(
            f"question {question.id!r} names no gold passages, so that an oracle cannot judge: give judge=FOLDER of a model, or "
            "judge=http://… of a service and its judge_model (flags --judge and --judge_model of a launcher that has them)"
        )
    return question.gold


def require_gold(questions: Iterable[Question]) -> None:
    """Raises UserError for the first question of which an oracle knows too little."""
    for question in questions:
        gold_titles(question)


def chain_coverage(question: Question, told: Transcript) -> float:
    """Share of the gold passages whose titles the reasoning names."""
    thought = f" {normalize_answer(' '.join(text for who, text in told.segments if who != ENVIRONMENT))} "
    named = [f" {normalize_answer(title)} " in thought for title in gold_titles(question)]
    return sum(named) / len(named)


def groundedness(question: Question, told: Transcript) -> float:
    """Share of the names and numbers in the reasoning that stood in the question or in what had been found before; 1 where
    there are none.

    A word counts that has a digit, or begins with a capital letter and not a sentence.
    """
    checked = [stood for _, stood in claims(question, told)]
    return sum(checked) / len(checked) if checked else 1.0


def claims(question: Question, told: Transcript) -> list[tuple[str, bool]]:
    """The names and numbers in the reasoning, word by word, and whether each stood in the question or in what had been found
    before."""
    seen = _words(question.text)
    found = []
    for who, text in told.segments:
        if who == ENVIRONMENT:
            seen |= _words(text)
            continue
        found += [(word, word.lower() in seen) for word in _claims(text)]
    return found


def final_thought(told: Transcript) -> str:
    """What was thought after the last search."""
    after: list[str] = []
    for who, text in told.segments:
        after = [] if who == ENVIRONMENT else [*after, text]
    return " ".join(after)


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text)}


def _claims(text: str) -> Iterable[str]:
    """The names and numbers of a text."""
    for sentence in _SENTENCE.split(text):
        for place, word in enumerate(_WORD.findall(sentence)):
            if any(c.isdigit() for c in word) or (place and len(word) > 1 and word[0].isupper()):
                yield word
