"""Answer metrics: exact match, token F1 and cover exact match, each the maximum over the gold answers."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rrl.errors import UserError
from rrl.text.normalize import RRL, YES_NO, Rule

CHUNK = 4096
"""Predictions that are normalised as one text."""


class AnswerScores(NamedTuple):
    """What one prediction earns, each in [0, 1]."""

    em: float
    f1: float
    cem: float


def score_answer(predictions: str | Sequence[str], answers: Sequence[str], rule: Rule = RRL) -> AnswerScores:
    """The three metrics at once, each text normalised once; of several predictions the best by each metric.

    Several predictions are the short answers that were extracted from one long one (R3-RAG, section 4.1); none of them scores 0.

    Raises UserError if there is no gold answer.
    """
    return score_answers([predictions], [answers], rule)[0]


def score_answers(
    predictions: Sequence[str | Sequence[str]], answers: Sequence[Sequence[str]], rule: Rule = RRL
) -> list[AnswerScores]:
    """`score_answer` of each prediction and the gold answers beside it, several times as fast."""
    scores: list[AnswerScores] = []
    for start in range(0, len(predictions), CHUNK):
        given = [[p] if isinstance(p, str) else p for p in predictions[start : start + CHUNK]]
        wanted = answers[start : start + CHUNK]
        for gold in wanted:
            _refuse_no_gold(gold)
        raw = [text for pair in zip(given, wanted, strict=True) for texts in pair for text in texts]
        texts, at = rule.normalize_all(raw), 0
        for some, gold in zip(given, wanted):
            middle, end = at + len(some), at + len(some) + len(gold)
            scores.append(_scored(some, texts[at:middle], gold, texts[middle:end], rule))
            at = end
    return scores


def _scored(
    given: Sequence[str], texts: Sequence[str], answers: Sequence[str], wanted: Sequence[str], rule: Rule
) -> AnswerScores:
    em = f1 = cem = 0.0
    for raw, text in zip(given, texts):
        if text and text in wanted:
            return AnswerScores(1.0, 1.0, 1.0)
        words = frozenset(text.split())
        for gold, target in zip(answers, wanted):
            shared = not words.isdisjoint(target.split())
            if shared or not text or not target:
                em = max(em, _exact(raw, text, gold, target, rule))
                f1 = max(f1, _f1(raw, text, gold, target, rule))
            if not cem and (shared or not target or rule.cover == "substring"):
                cem = _cover(raw, text, gold, target, rule)
    return AnswerScores(em, f1, cem)


def exact_match(prediction: str, answers: Sequence[str], rule: Rule = RRL) -> float:
    """1.0 if the normalised prediction equals a normalised gold answer, else 0.0.

    Raises UserError if there is no gold answer.
    """
    return _best(_exact, prediction, answers, rule)


def token_f1(prediction: str, answers: Sequence[str], rule: Rule = RRL) -> float:
    """F1 of the bags of normalised words, in [0, 1] (R-Search, Eq. 3; SQuAD's definition).

    Raises UserError if there is no gold answer.
    """
    return _best(_f1, prediction, answers, rule)


def cover_exact_match(prediction: str, answers: Sequence[str], rule: Rule = RRL) -> float:
    """1.0 if a normalised gold answer stands inside the normalised prediction as whole words (CEM), else 0.0.

    A rule may ask for less than whole words in a row. Raises UserError if there is no gold answer.
    """
    return _best(_cover, prediction, answers, rule)


_Metric = Callable[[str, str, str, str, Rule], float]
"""Of the prediction and its normalised form, the gold answer and its normalised form, and the rule."""


def _best(score: _Metric, prediction: str, answers: Sequence[str], rule: Rule) -> float:
    _refuse_no_gold(answers)
    text = rule.normalize(prediction)
    return max(score(prediction, text, gold, rule.normalize(gold), rule) for gold in answers)


def _refuse_no_gold(answers: Sequence[str]) -> None:
    if isinstance(answers, str) or not answers:
        raise UserError(
            f"answers: got {answers!r}; a question needs a list of at least one gold answer. "
            "Give the question's answers, or leave the question out of the data."
        )


def _bare(raw: str, gold: str, rule: Rule) -> float:
    # A gold answer of articles or punctuation alone ("The The", "!!!") normalises to nothing;
    # compared as normalised text it would pay for an empty prediction.
    raw, gold = (" ".join(rule.canonicalize(text).lower().split()) for text in (raw, gold))
    return float(raw == gold)


def _exact(raw: str, text: str, gold: str, wanted: str, rule: Rule) -> float:
    if not wanted and rule.empty == "written":
        return _bare(raw, gold, rule)
    return float(text == wanted)


def _f1(raw: str, text: str, gold: str, wanted: str, rule: Rule) -> float:
    if not wanted or not text:
        if wanted or rule.empty == "zero":
            return 0.0
        return _bare(raw, gold, rule) if rule.empty == "written" else float(text == wanted)
    if rule.yes_no_whole and text != wanted and (text in YES_NO or wanted in YES_NO):
        return 0.0
    ours, theirs = text.split(), wanted.split()
    if not (shared := _overlap(ours, theirs)):
        return 0.0
    found = 2 * shared / (len(ours) + len(theirs))
    return found if rule.f1_decimals is None else round(found, rule.f1_decimals)


def _overlap(ours: list[str], theirs: list[str]) -> int:
    """Size of what two bags of words share."""
    common = set(ours).intersection(theirs)
    if not common:
        return 0
    if len(ours) == len(theirs) == len(common):
        return len(common)
    return (Counter(ours) & Counter(theirs)).total()


def _cover(raw: str, text: str, gold: str, wanted: str, rule: Rule) -> float:
    if not wanted and rule.empty == "written":
        return _bare(raw, gold, rule)
    if rule.cover == "substring":
        return float(wanted in text)  # nothing stands in every text, as in FlashRAG's and Search-R1's scripts
    if not wanted:
        return float(text == wanted)
    if rule.cover == "words":
        return float(set(text.split()).issuperset(wanted.split()))
    return float(f" {wanted} " in f" {text} ")
