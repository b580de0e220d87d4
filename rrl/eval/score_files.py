"""Score a file of predictions, and compare it with another file of predictions for the same questions.

Read `score_files` first.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from rrl.data.questions import Question, load_questions
from rrl.errors import UserError
from rrl.eval.matching import drop_unscorable, match_predictions, questions_in_file, scorable
from rrl.eval.prediction_files import load_predictions
from rrl.eval.predictions import Prediction
from rrl.eval.result_card import ResultCard, differences, load_card, questions_fingerprint
from rrl.eval.score_report import compare_scores, report, write_report
from rrl.eval.scoring import Scores, score
from rrl.text.normalize import rule_named


@dataclasses.dataclass(frozen=True)
class ScoringOptions:
    """How predictions are read, matched and scored."""

    normalization: str = "squad"
    """A name of `rrl.text.normalize.RULES`."""
    field: str = ""
    """Field of the prediction in a record; "": see `load_predictions`."""
    judge_field: str = ""
    """Field of a judge's verdict in a record; "": none."""
    missing: Literal["refuse", "wrong"] = "refuse"
    """Whether a question without a prediction is refused or counts as wrong."""
    match: Literal["id", "question"] = "id"
    """Whether predictions are matched to questions by id or by text."""
    level: float = 0.95
    """Level of the confidence intervals."""
    seed: int = 0
    """Seed of the bootstrap."""

    def load(self, file: str) -> list[Prediction]:
        """Read a file of predictions."""
        return load_predictions(file, self.field, self.judge_field)


@dataclasses.dataclass(frozen=True)
class _Questions:
    """The questions of `--data` or, without it, of the prediction file itself."""

    file: str
    in_predictions: bool
    """Whether `file` is the prediction file. Its questions and predictions are then in the same order."""
    all: Sequence[Question]
    is_scored: Sequence[bool]
    """Whether each question is scored (`scorable`)."""

    @property
    def scored(self) -> list[Question]:
        return [question for question, is_scored in zip(self.all, self.is_scored, strict=True) if is_scored]


def score_files(
    file: str,
    *,
    data: str | None = None,
    truth: str | None = None,
    against: str | None = None,
    card_file: str | None = None,
    out: str | None = None,
    options: ScoringOptions | None = None,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Score a file of predictions, write the report if `out` is given, and return it.

    Args:
      file: the predictions.
      data: questions with gold answers; None: the predictions file has them.
      truth: gold answers of `data`, if it has none (MultiHop-RAG).
      against: predictions of another run on the same questions, for paired tests.
      card_file: result card of the run, which the report then contains.
      out: folder for metrics.json and scores.jsonl.
      options: how predictions are read, matched and scored.
      log: receives the number of excluded questions.

    Returns the report of `rrl.eval.score_report.report`, with the files and, if `against` is given, the keys "against" and
    "unlike" (what makes the runs not comparable). Wrong input raises UserError; then nothing is written.
    """
    options = options or ScoringOptions()
    if truth and not data:
        raise UserError("--truth holds the answers of --data; give --data too")
    rule_named(options.normalization)  # refuses an unknown name before a file is read
    card = _load_card(card_file, options.normalization) if card_file else None
    predictions = options.load(file)
    questions = _load_questions(file, predictions, data, truth, options)
    if not all(questions.is_scored):
        log(
            f"excluded: {questions.is_scored.count(False)} questions that {questions.file} marks as unanswerable"
        )
    if card:
        _refuse_other_questions(card, card_file, questions)

    scores = _score(file, predictions, questions, options)
    result: dict[str, Any] = {
        "predictions": file,
        "data": questions.file,
        "normalization": options.normalization,
    }
    result |= report(scores, seed=options.seed, level=options.level)
    if against:
        other_predictions = predictions if against == file else options.load(against)
        other_scores = _score(against, other_predictions, questions, options)
        result |= _comparison(file, scores, against, other_scores, options)
    if card:
        result["card"] = dataclasses.asdict(card)
    if out:
        write_report(out, result, scores)
    return result


def _load_card(card_file: str, normalization: str) -> ResultCard:
    """Read the card. Raises UserError if it states another normalisation."""
    card = load_card(card_file)
    if card.normalization != normalization:
        raise UserError(
            f"--normalization={normalization}, but the card {card_file} states {card.normalization}; give that, or another card"
        )
    return card


def _load_questions(
    file: str, predictions: Sequence[Prediction], data: str | None, truth: str | None, options: ScoringOptions
) -> _Questions:
    """Return the questions. Raises UserError if all are unanswerable, and the normalisation does not score these."""
    questions = (
        load_questions(data, truth=truth, unanswerable="empty")
        if data
        else questions_in_file(predictions, file)
    )
    is_scored = scorable(questions, rule_named(options.normalization))
    if not any(is_scored):
        raise UserError(
            f"{data or file}: all {len(questions)} questions are unanswerable; --normalization=squad2 scores unanswerable "
            "questions"
        )
    return _Questions(data or file, not data, questions, is_scored)


def _refuse_other_questions(card: ResultCard, card_file: str | None, questions: _Questions) -> None:
    """Raise UserError if the card is that of other questions."""
    if questions_fingerprint(questions.scored) != card.questions_sha256:
        raise UserError(
            f"{questions.file}: its {len(questions.scored)} questions are not the {card.questions} of the card {card_file}, or "
            "their order differs; give --data=questions.jsonl of the run"
        )


def _score(
    file: str, predictions: Sequence[Prediction], questions: _Questions, options: ScoringOptions
) -> Scores:
    """Match the predictions of a file to the questions, and score them."""
    matched: Sequence[Prediction | None]
    if questions.in_predictions and file == questions.file:  # each record holds its question
        matched = [p for p, is_scored in zip(predictions, questions.is_scored, strict=True) if is_scored]
    else:
        matched = match_predictions(
            drop_unscorable(predictions, questions.all, questions.is_scored),
            questions.scored,
            file,
            questions.file,
            options.missing,
            options.match,
        )
    rule = rule_named(options.normalization)
    return score(matched, questions.scored, rule, judged=bool(options.judge_field))


def _comparison(
    file: str, scores: Scores, against: str, other_scores: Scores, options: ScoringOptions
) -> dict[str, Any]:
    """Return the paired tests, and what makes the runs not comparable."""
    return {
        "against_file": against,
        "against": compare_scores(scores, other_scores, seed=options.seed, level=options.level),
        "unlike": _not_comparable({file: scores, against: other_scores}, options.normalization),
    }


def _not_comparable(scores: dict[str, Scores], normalization: str) -> list[str]:
    """Return what makes two runs not comparable, given their scores by file: their result cards, and their gold passages."""
    # The result card of an evaluation lies beside its predictions.
    card_files = {file: Path(file).parent / "card.json" for file in scores}
    # Both files are scored here with the same rule, whatever their cards state.
    cards = {
        file: dataclasses.replace(load_card(card_file), normalization=normalization)
        for file, card_file in card_files.items()
        if card_file.is_file()
    }
    lines = differences(cards)
    keys = {file: each.gold_key_and_warning[0] for file, each in scores.items() if each.hits}
    if len(set(keys.values())) > 1:
        lines.append(f"gold passages: {'; '.join(f'{file} by {key}' for file, key in keys.items())}")
    return lines
