"""Match predictions to questions, and decide which questions are scored.

Read `match_predictions` first.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rrl.data.gold_answers import EMPTY_ANSWER
from rrl.data.questions import Question, question_of
from rrl.data.records import read_records
from rrl.errors import UserError
from rrl.eval.predictions import Prediction
from rrl.text.characters import canonical_unicode
from rrl.text.normalize import AnswerRule


def questions_in_file(predictions: Sequence[Prediction], predictions_file: str) -> list[Question]:
    """Return the questions and gold answers that `predictions_file` itself contains.

    Unanswerable questions have empty gold answers (see `scorable`). Raises UserError, with the line, for a record without gold
    answers.
    """
    questions = []
    for position, prediction in enumerate(predictions):
        try:
            # KILT has its gold answers under "output" too, which holds the predictions here.
            fields = {name: value for name, value in prediction.record.items() if name != "output"}
            questions.append(question_of(position, fields, unanswerable="empty"))
        except ValueError as error:
            raise UserError(
                f"{predictions_file}, {prediction.place}: {error}. The file has no gold answers: give the questions with --data."
            ) from error
    return questions


def scorable(questions: Sequence[Question], rule: AnswerRule) -> list[bool]:
    """Return for each question whether it is scored.

    Unanswerable questions are scored only if `rule` rewards an empty answer, as SQuAD 2.0 does.

    In MuSiQue-Full an answerable and an unanswerable question share an id. The answerable one is scored, as in MuSiQue's own
    evaluation of answers.
    """
    answerable = {question.id for question in questions if question.answers != EMPTY_ANSWER}
    empty_can_be_right = rule.empty_gold == "equal"
    return [q.answers != EMPTY_ANSWER or (empty_can_be_right and q.id not in answerable) for q in questions]


def drop_unscorable(
    predictions: Sequence[Prediction], questions: Sequence[Question], is_scored: Sequence[bool]
) -> list[Prediction]:
    """Return the predictions without those for questions that are not scored; `is_scored` comes from `scorable`."""
    scored = [question for question, use in zip(questions, is_scored, strict=True) if use]
    unscored = [question for question, use in zip(questions, is_scored, strict=True) if not use]
    ids = {question.id for question in unscored} - {question.id for question in scored}
    texts = {_normalized(q.text) for q in unscored} - {_normalized(q.text) for q in scored}
    return [
        p for p in predictions if (_normalized(p.question) not in texts if p.id is None else p.id not in ids)
    ]


def match_predictions(
    predictions: Sequence[Prediction],
    questions: Sequence[Question],
    predictions_file: str,
    questions_file: str,
    missing: Literal["refuse", "wrong"] = "refuse",
    by: Literal["id", "question"] = "id",
) -> list[Prediction | None]:
    """Return the prediction for each question.

    When matching by text, predictions for questions with the same text are assigned to them in order.

    Args:
      predictions: of one file; their ids, if they have any, are unique.
      questions: with unique ids.
      predictions_file: name of the file of the predictions, for messages.
      questions_file: name of the file of the questions, for messages.
      missing: "wrong": None for a question without a prediction; "refuse": an error.
      by: match by "id", or by the text of the "question". Predictions without ids are always matched by text.

    Raises UserError, with the line, for an id or text that is not among the questions, for a text that occurs more often in the
    predictions than in the questions, for an id whose prediction has the text of another question, and for a missing prediction
    unless `missing` is "wrong". Raises UserError if more than half of the predictions that are matched by id have another text
    than their question.
    """
    by_id = by == "id" and all(prediction.id is not None for prediction in predictions)
    question_keys: Sequence[Any]
    prediction_keys: Sequence[Any]
    if by_id:
        question_keys, prediction_keys = [q.id for q in questions], [p.id for p in predictions]
    else:
        question_keys = _numbered_texts([q.text for q in questions])
        prediction_keys = _numbered_texts([p.question for p in predictions])
    positions = _positions(question_keys, questions_file)
    text_check = _TextCheck(questions, predictions_file, questions_file)
    matched: list[Prediction | None] = [None] * len(questions)
    for prediction, key in zip(predictions, prediction_keys):
        if key not in positions:
            raise _unknown_question(prediction, len(questions), predictions_file, questions_file, by_id)
        if by_id:
            text_check.add(prediction, positions[key])
        matched[positions[key]] = prediction
    text_check.finish()
    if missing == "refuse":
        _refuse_missing(matched, questions, predictions_file, questions_file)
    return matched


def _positions(keys: Sequence[Any], questions_file: str) -> dict[Any, int]:
    """Return the position of each question by its key. Raises UserError for a repeated key."""
    positions: dict[Any, int] = {}
    for at, key in enumerate(keys):
        if key in positions:
            raise UserError(
                f"{questions_file}, {_place(questions_file, at)}: id {key!r} occurs twice, first at "
                f"{_place(questions_file, positions[key])}"
            )
        positions[key] = at
    return positions


class _TextCheck:
    """Checks that predictions matched by id have the text of their question.

    Some files use the number of a question as its id. Their texts show whether two files number the questions in the same order.
    """

    def __init__(self, questions: Sequence[Question], predictions_file: str, questions_file: str) -> None:
        self._questions = questions
        self._predictions_file, self._questions_file = predictions_file, questions_file
        self._positions: dict[str, list[int]] = {}
        for at, question in enumerate(questions):
            self._positions.setdefault(_normalized(question.text), []).append(at)
        self._with_text = self._different = 0

    def add(self, prediction: Prediction, position: int) -> None:
        """Check one match. Raises UserError if the prediction has the text of another question."""
        text = _normalized(prediction.question)
        if text:
            self._with_text += 1
            self._different += _normalized(self._questions[position].text) not in text
        same_text = self._positions.get(text, [])
        if same_text and position not in same_text:
            raise UserError(
                f"{self._predictions_file}, {prediction.place}: id {prediction.id!r} has the question "
                f"{prediction.question!r:.80}, which in {self._questions_file} is {_place(self._questions_file, same_text[0])}, "
                f"id {self._questions[same_text[0]].id!r}. Match by the texts with --match=question."
            )

    def finish(self) -> None:
        """Raise UserError if more than half of the texts differ. Single ones may differ in spelling or instructions."""
        if self._different > self._with_text / 2:
            raise UserError(
                f"{self._predictions_file}: {self._different} of {self._with_text} predictions have another question than the "
                f"one with their id in {self._questions_file}. Give the questions of these predictions; if the ids are right, "
                "leave the texts out of the predictions."
            )


def _unknown_question(
    prediction: Prediction, count: int, predictions_file: str, questions_file: str, by_id: bool
) -> UserError:
    """Return the error for a prediction that matches none of the `count` questions."""
    what = f"id {prediction.id!r}" if by_id else f"question {prediction.question!r:.80}"
    too_often = "" if by_id else ", or occurs more often in the predictions than among these"
    remedy = ", or match by their texts with --match=question" if by_id and prediction.question else ""
    return UserError(
        f"{predictions_file}, {prediction.place}: {what} is not among the {count} questions of {questions_file}{too_often}. "
        f"Give the questions of these predictions{remedy}."
    )


def _refuse_missing(
    matched: Sequence[Prediction | None],
    questions: Sequence[Question],
    predictions_file: str,
    questions_file: str,
) -> None:
    """Raise UserError if a question has no prediction."""
    missing = [at for at, prediction in enumerate(matched) if prediction is None]
    if missing:
        ids = ", ".join(repr(questions[at].id) for at in missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise UserError(
            f"{predictions_file}: no prediction for {len(missing)} of the {len(questions)} questions of {questions_file} "
            f"(ids {ids}; the first at {_place(questions_file, missing[0])}). "
            "Predict them, or count them as wrong with --missing=wrong."
        )


def _normalized(text: str) -> str:
    """Return a text in one Unicode form, without case and extra white space."""
    return " ".join(canonical_unicode(text).casefold().split())


def _numbered_texts(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Return each normalised text with the number of times that it occurred before."""
    seen: dict[str, int] = {}
    keys = []
    for text in texts:
        key = _normalized(text)
        keys.append((key, seen.get(key, 0)))
        seen[key] = seen.get(key, 0) + 1
    return keys


def _place(questions_file: str, at: int) -> str:
    """Return the place of a question in its file, or its number if `questions_file` is not a file."""
    if Path(questions_file).is_file():
        for position, (place, _) in enumerate(read_records(questions_file)):
            if position == at:
                return place
    return f"question {at + 1}"
