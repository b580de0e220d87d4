"""Read files of predictions: JSON lines, or one JSON document.

Read `load_predictions` first.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rrl.data.records import read_records
from rrl.data.tables import QUESTION_FIELDS, QUESTION_ID_FIELDS
from rrl.errors import UserError
from rrl.eval.predictions import PREDICTION_FIELDS, Prediction, parse_prediction

FORMATS = (
    "records {id or question, prediction}, optionally with titles, retrieval_result, retrieved_docids or searches, turns, tokens "
    f"(the prediction under one of {', '.join(PREDICTION_FIELDS)}), or one object {{id: prediction}}"
)


def load_predictions(path: str | Path, field: str = "", judge_field: str = "") -> list[Prediction]:
    """Read a prediction file (see `FORMATS`): JSON lines or one document, optionally gzipped.

    Args:
      path: the file.
      field: name of the prediction in a record, such as "output.pred" for a nested one; "": the first of `PREDICTION_FIELDS`.
      judge_field: name of a judge's verdict in a record, true or false; "": none.

    Raises UserError, with the line, for a record that cannot be read, has no prediction, has neither id nor question, or has no
    id while others have one. Raises UserError, with both lines, for a repeated id, or a repeated record if there are no ids.
    """
    predictions: list[Prediction] = []
    first: dict[str, str] = {}
    for place, record in _records(path):
        try:
            prediction = parse_prediction(place, record, field, judge_field)
            if predictions and (prediction.id is None) != (predictions[0].id is None):
                has, lacks = (
                    (predictions[0], prediction) if prediction.id is None else (prediction, predictions[0])
                )
                raise ValueError(f"id: missing at {lacks.place}, while {has.place} has {has.id!r}")
            key = json.dumps(record, sort_keys=True) if prediction.id is None else prediction.id
            if key in first:
                what = "the same record" if prediction.id is None else f"id: {prediction.id!r}"
                raise ValueError(f"{what} occurs twice, first at {first[key]}")
            first[key] = place
        except ValueError as error:
            raise UserError(f"{path}, {place}: {error}. Allowed: {FORMATS}.") from error
        predictions.append(prediction)
    if not predictions:
        raise UserError(f"{path}: the file is empty. Allowed: {FORMATS}.")
    if empty := sum(prediction.empty_passages for prediction in predictions):
        logging.getLogger(__name__).warning(
            "%s: left out %d passages with neither title nor text", path, empty
        )
    return predictions


def _records(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield each record with its place in the file. An object of answers by id yields a record for each answer."""
    records = list(read_records(path))
    if len(records) == 1 and isinstance(records[0][1], dict):
        answers = _answers_by_id(records[0][1])
        if answers is not None:
            yield from (
                (f"id {name!r}", {"id": name, "prediction": answer}) for name, answer in answers.items()
            )
            return
    yield from records


def _answers_by_id(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answers of a document in SQuAD's format, {id: answer}, or in that of HotpotQA and 2Wiki,
    {"answer": {id: answer}} with supporting facts and evidence; None for a single record."""
    if isinstance(document.get("answer"), dict) and set(document) <= {"answer", "sp", "evidence"}:
        return document["answer"]
    prediction_fields = (name.partition(".")[0] for name in PREDICTION_FIELDS)
    fields_of_a_record = {*QUESTION_ID_FIELDS, *QUESTION_FIELDS, *prediction_fields}
    return None if fields_of_a_record & document.keys() else document
