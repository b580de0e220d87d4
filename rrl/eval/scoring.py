"""Score predictions: answer metrics, costs and gold passages, one value per question.

Read `Scores` and `score` first. `rrl.eval.matching` assigns predictions to questions, `rrl.eval.score_report` summarises scores.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.eval.predictions import Prediction
from rrl.retrieval.gold import TITLES, GoldHits, gold_key, hits_by_key
from rrl.text.metrics import score_answers
from rrl.text.normalize import RRL_RULE, AnswerRule
from rrl.text.short_answers import choice_correct

OTHER_TOKENS = ("prompt_tokens", "environment_tokens", "reader_prompt_tokens", "reader_tokens")
"""Counts of tokens that the policy did not sample: what it read, and what the reader model read and wrote."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of one run, one value per question."""

    questions: Sequence[Question]
    metrics: Mapping[str, Float[np.ndarray, "Q"]]
    """em, f1, cem (acc for multiple choice) and judge, in [0, 1]; 0 for a question without a prediction."""
    counts: Mapping[str, Float[np.ndarray, "Q"]]
    """searches, turns, tokens (sampled), those of `OTHER_TOKENS`, and seconds; each only if every prediction has it. 0 for a
    question without a prediction."""
    titles: Sequence[Sequence[str]] | None
    """Titles of the passages retrieved for each question; None if a prediction lacks them."""
    ids: Sequence[Sequence[str]] | None = None
    """Ids of these passages; None if a prediction lacks them."""
    missing: int = 0
    """Number of questions without a prediction; these count as wrong."""
    unparsed: int = 0
    """Number of the judge's verdicts that could not be parsed; these count as wrong."""
    failed_searches: int = 0
    """Number of searches that the predictions mark as failed."""

    @property
    def main_metric(self) -> str:
        """The metric that counts an answer as right or wrong."""
        return "acc" if "acc" in self.metrics else "em"

    @functools.cached_property
    def gold_key_and_warning(self) -> tuple[str, str]:
        """How gold passages are recognised ("gold ids", "gold titles", or "" if not at all), and why gold ids are not used.

        The key is "" if the predictions have neither ids nor titles of passages. The warning is "" if there is nothing to warn
        of. See `rrl.retrieval.gold.gold_key`.
        """
        if self.ids is None:
            return self._gold_key_without_ids()
        titles = self.titles if self.titles is not None else [[""] * len(row) for row in self.ids]
        passages = (
            pair
            for row_ids, row_titles in zip(self.ids, titles, strict=True)
            for pair in zip(row_ids, row_titles, strict=True)
        )
        key, warning = gold_key(self.questions, passages)
        return ("" if key == TITLES and self.titles is None else key), warning

    def _gold_key_without_ids(self) -> tuple[str, str]:
        if self.titles is None:
            return "", ""
        key = TITLES if any(question.gold for question in self.questions) else ""
        has_gold_ids = any(question.gold_ids for question in self.questions)
        return key, "the predictions do not have the ids of the retrieved passages" if has_gold_ids else ""

    @functools.cached_property
    def hits(self) -> GoldHits | None:
        """Which of the retrieved passages are gold; None if retrieved or gold passages are not known."""
        key, _ = self.gold_key_and_warning
        return hits_by_key(key, self.ids or (), self.titles or (), self.questions) if key else None

    @property
    def retrieval_metrics(self) -> dict[str, Float[np.ndarray, "Q"]]:
        """recall, full_recall, map, hits and mrr of all retrieved passages, NaN for a question without gold passages."""
        return self.hits.metrics() if self.hits is not None else {}


def score(
    predictions: Sequence[Prediction | None],
    questions: Sequence[Question],
    rule: AnswerRule = RRL_RULE,
    judged: bool = False,
) -> Scores:
    """Score each prediction against its question; None counts as wrong.

    Args:
      predictions: one per question, as from `rrl.eval.matching.match_predictions`.
      questions: the questions.
      rule: normalisation of answers.
      judged: whether the predictions have verdicts of a judge, which become the metric "judge".

    Raises UserError if some questions are multiple choice and others are not.
    """
    present = [prediction for prediction in predictions if prediction]
    metrics = _answer_metrics(predictions, questions, rule)
    if judged:
        metrics["judge"] = np.array([float(bool(p and p.verdict)) for p in predictions])
    counts = {
        name: np.array([p.counts[name] if p else 0.0 for p in predictions])
        for name in (present[0].counts if present else ())
        if all(name in p.counts for p in present)
    }
    have_titles = bool(present) and all(p.titles is not None for p in present)
    have_ids = bool(present) and all(p.ids is not None for p in present)
    return Scores(
        questions,
        metrics,
        counts,
        titles=[(p.titles or ()) if p else () for p in predictions] if have_titles else None,
        ids=[(p.ids or ()) if p else () for p in predictions] if have_ids else None,
        missing=len(predictions) - len(present),
        unparsed=sum(p.verdict is None for p in present) if judged else 0,
        failed_searches=sum(p.failed_searches for p in present),
    )


def _answer_metrics(
    predictions: Sequence[Prediction | None], questions: Sequence[Question], rule: AnswerRule
) -> dict[str, np.ndarray]:
    """Return acc of multiple-choice questions, or em, f1 and cem of others."""
    # If an empty answer can be right, a prediction without an answer is scored as an empty answer. A question without a
    # prediction counts as wrong under every rule.
    no_answer = ("",) if rule.empty_gold == "equal" else ()
    answers = [(prediction.answers or no_answer) if prediction else () for prediction in predictions]
    multiple_choice = sum(bool(question.choices) for question in questions)
    if multiple_choice == len(questions):
        acc = [
            max((choice_correct(answer, q.answers, q.choices) for answer in given), default=0.0)
            for given, q in zip(answers, questions, strict=True)
        ]
        return {"acc": np.array(acc)}
    if multiple_choice:
        raise UserError(
            f"{multiple_choice} of {len(questions)} questions are multiple choice: score them separately from the others"
        )
    scores = score_answers(answers, [question.answers for question in questions], rule)
    em, f1, cem = np.array(scores, np.float64).reshape(-1, 3).T
    return {"em": em, "f1": f1, "cem": cem}
