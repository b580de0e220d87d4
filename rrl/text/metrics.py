"""Answer metrics: exact match, token F1 and cover exact match, each the maximum over the gold answers.

Read `score_answer` first.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rrl.errors import UserError
from rrl.text.normalize import RRL_RULE, YES_NO, AnswerRule

CHUNK = 4096
"""Number of predictions that are normalised as one text, for speed."""


class AnswerScores(NamedTuple):
    """Scores of one prediction, each in [0, 1]."""

    em: float
    """Exact match."""
    f1: float
    """Token F1."""
    cem: float
    """Cover exact match."""


def score_answer(
    predictions: str | Sequence[str], answers: Sequence[str], rule: AnswerRule = RRL_RULE
) -> AnswerScores:
    """Compute the three metrics of a prediction; of several predictions, the best value of each metric.

    Args:
      predictions: one prediction, or the short answers that were extracted from one long answer (R3-RAG, section 4.1). An empty
        list scores 0.
      answers: the gold answers.
      rule: the normalisation.

    Raises:
      UserError: there is no gold answer.
    """
    return score_answers([predictions], [answers], rule)[0]


def score_answers(
    predictions: Sequence[str | Sequence[str]], answers: Sequence[Sequence[str]], rule: AnswerRule = RRL_RULE
) -> list[AnswerScores]:
    """Compute `score_answer` for each prediction and its gold answers, several times faster than separate calls."""
    scores: list[AnswerScores] = []
    for start in range(0, len(predictions), CHUNK):
        prediction_lists = [[p] if isinstance(p, str) else p for p in predictions[start : start + CHUNK]]
        gold_lists = answers[start : start + CHUNK]
        for gold in gold_lists:
            _check_gold(gold)
        # Predictions and gold answers of each question in turn, normalised together.
        raw = [
            text
            for pair in zip(prediction_lists, gold_lists, strict=True)
            for texts in pair
            for text in texts
        ]
        texts, start_of_pair = rule.normalize_all(raw), 0
        for candidates, gold in zip(prediction_lists, gold_lists):
            middle = start_of_pair + len(candidates)
            end = middle + len(gold)
            scores.append(
                _best_scores(candidates, texts[start_of_pair:middle], gold, texts[middle:end], rule)
            )
            start_of_pair = end
    return scores


def _best_scores(
    predictions: Sequence[str],
    normalized_predictions: Sequence[str],
    answers: Sequence[str],
    normalized_answers: Sequence[str],
    rule: AnswerRule,
) -> AnswerScores:
    """Return the best scores of the predictions for the gold `answers`. Metrics that must be 0 are not computed."""
    em = f1 = cem = 0.0
    for prediction, normalized in zip(predictions, normalized_predictions):
        if normalized and normalized in normalized_answers:
            return AnswerScores(1.0, 1.0, 1.0)
        words = frozenset(normalized.split())
        for gold, normalized_gold in zip(answers, normalized_answers):
            shared = not words.isdisjoint(normalized_gold.split())
            if shared or not normalized or not normalized_gold:
                em = max(em, _exact(prediction, normalized, gold, normalized_gold, rule))
                f1 = max(f1, _f1(prediction, normalized, gold, normalized_gold, rule))
            if not cem and (shared or not normalized_gold or rule.cover == "substring"):
                cem = _cover(prediction, normalized, gold, normalized_gold, rule)
    return AnswerScores(em, f1, cem)


def exact_match(prediction: str, answers: Sequence[str], rule: AnswerRule = RRL_RULE) -> float:
    """Return 1.0 if the normalised prediction equals a normalised gold answer, else 0.0.

    Raises UserError if there is no gold answer.
    """
    return _best(_exact, prediction, answers, rule)


def token_f1(prediction: str, answers: Sequence[str], rule: AnswerRule = RRL_RULE) -> float:
    """Return the F1 of the bags of normalised words, in [0, 1] (R-Search, Eq. 3; SQuAD's definition).

    Raises UserError if there is no gold answer.
    """
    return _best(_f1, prediction, answers, rule)


def cover_exact_match(prediction: str, answers: Sequence[str], rule: AnswerRule = RRL_RULE) -> float:
    """Return 1.0 if the normalised prediction contains a normalised gold answer as consecutive whole words (CEM), else 0.0.

    A rule may require less (`AnswerRule.cover`). Raises UserError if there is no gold answer.
    """
    return _best(_cover, prediction, answers, rule)


_Metric = Callable[[str, str, str, str, AnswerRule], float]
"""`_exact`, `_f1` or `_cover`: (prediction, normalized, gold, normalized_gold, rule) -> score. `normalized` and `normalized_gold`
are the normalised forms of the prediction and of the gold answer `gold`."""


def _best(metric: _Metric, prediction: str, answers: Sequence[str], rule: AnswerRule) -> float:
    """Return the metric of the prediction, the maximum over the gold answers."""
    _check_gold(answers)
    normalized = rule.normalize(prediction)
    return max(metric(prediction, normalized, gold, rule.normalize(gold), rule) for gold in answers)


def _check_gold(answers: Sequence[str]) -> None:
    if isinstance(answers, str) or not answers:
        raise UserError(
            f"answers: got {answers!r}; a question needs a list of at least one gold answer. "
            "Give the answers of the question, or remove the question from the data."
        )


def _unnormalized_match(prediction: str, gold: str, rule: AnswerRule) -> float:
    """Return the exact match of the texts before normalisation, up to case and white space.

    It is used for a gold answer of only articles or punctuation ("The The", "!!!"), which normalises to nothing: its normalised
    form would equal an empty prediction.
    """
    prediction, gold = (" ".join(rule.canonicalize(text).lower().split()) for text in (prediction, gold))
    return float(prediction == gold)


def _exact(prediction: str, normalized: str, gold: str, normalized_gold: str, rule: AnswerRule) -> float:
    if not normalized_gold and rule.empty_gold == "unnormalized":
        return _unnormalized_match(prediction, gold, rule)
    return float(normalized == normalized_gold)


def _f1(prediction: str, normalized: str, gold: str, normalized_gold: str, rule: AnswerRule) -> float:
    if not normalized_gold or not normalized:  # see `AnswerRule.empty_gold`
        if normalized_gold or rule.empty_gold == "zero":
            return 0.0
        return (
            _unnormalized_match(prediction, gold, rule)
            if rule.empty_gold == "unnormalized"
            else float(normalized == normalized_gold)
        )
    if (
        rule.yes_no_exact
        and normalized != normalized_gold
        and (normalized in YES_NO or normalized_gold in YES_NO)
    ):
        return 0.0
    predicted, gold_words = normalized.split(), normalized_gold.split()
    if not (shared := _overlap(predicted, gold_words)):
        return 0.0
    f1 = 2 * shared / (len(predicted) + len(gold_words))
    return f1 if rule.f1_decimals is None else round(f1, rule.f1_decimals)


def _overlap(predicted: list[str], gold_words: list[str]) -> int:
    """Return the size of the intersection of two bags of words."""
    common = set(predicted).intersection(gold_words)
    if not common:
        return 0
    if len(predicted) == len(gold_words) == len(common):
        return len(common)
    return (Counter(predicted) & Counter(gold_words)).total()


def _cover(prediction: str, normalized: str, gold: str, normalized_gold: str, rule: AnswerRule) -> float:
    if not normalized_gold and rule.empty_gold == "unnormalized":
        return _unnormalized_match(prediction, gold, rule)
    if rule.cover == "substring":
        return float(
            normalized_gold in normalized
        )  # every text contains "", as in FlashRAG's and Search-R1's scripts
    if not normalized_gold:
        return float(normalized == normalized_gold)
    if rule.cover == "words":
        return float(set(normalized.split()).issuperset(normalized_gold.split()))
    return float(f" {normalized_gold} " in f" {normalized} ")
