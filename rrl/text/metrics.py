"""Answer metrics: exact match, token F1 and cover exact match, each the maximum over the gold answers."""

from collections import Counter
from collections.abc import Callable, Sequence

from rrl.errors import UserError
from rrl.text.normalize import answer_tokens, normalize_answer


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if the normalised prediction equals a normalised gold answer, else 0.0.

    Raises UserError if there is no gold answer.
    """
    return _best(_exact, prediction, answers)


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """F1 of the bags of normalised words, in [0, 1] (R-Search, Eq. 3; SQuAD's definition).

    Raises UserError if there is no gold answer.
    """
    return _best(_f1, prediction, answers)


def cover_exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if a normalised gold answer stands inside the normalised prediction as whole words (CEM), else 0.0.

    Raises UserError if there is no gold answer.
    """
    return _best(_cover, prediction, answers)


def _best(score: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    if isinstance(answers, str) or not answers:
        raise UserError(
            f"answers: got {answers!r}; a question needs a list of at least one gold answer. "
            "Give the question's answers, or leave the question out of the data."
        )
    return max(score(prediction, answer) for answer in answers)


def _bare(prediction: str, gold: str) -> float:
    # A gold answer of articles or punctuation alone ("The The", "!!!") normalises to nothing;
    # compared as normalised text it would pay for an empty prediction.
    return float(" ".join(prediction.lower().split()) == " ".join(gold.lower().split()))


def _exact(prediction: str, gold: str) -> float:
    wanted = normalize_answer(gold)
    return float(normalize_answer(prediction) == wanted) if wanted else _bare(prediction, gold)


def _f1(prediction: str, gold: str) -> float:
    wanted, given = answer_tokens(gold), answer_tokens(prediction)
    if not wanted:
        return _bare(prediction, gold)
    shared = (Counter(wanted) & Counter(given)).total()
    return 2 * shared / (len(wanted) + len(given))


def _cover(prediction: str, gold: str) -> float:
    wanted = normalize_answer(gold)
    return float(f" {wanted} " in f" {normalize_answer(prediction)} ") if wanted else _bare(prediction, gold)
