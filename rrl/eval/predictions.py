"""Read prediction files: a model's answer to each question, in the format of rrl, FlashRAG, HotpotQA, R1-Searcher or others.

Read `load_predictions` first.
"""

import dataclasses
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rrl.data.decoding import BrokenRecord
from rrl.data.field_names import PASSAGE_ID_FIELDS, PREDICTION_NAMES, QUESTION_FIELDS, QUESTION_ID_FIELDS
from rrl.data.fields import fields_of, id_field, list_field, question_fields_of
from rrl.data.gold_answers import answer_text
from rrl.data.passages import passage_of
from rrl.data.records import ExcludedRecord, read_records
from rrl.errors import UserError

PREDICTION_FIELDS = tuple(
    field for name in PREDICTION_NAMES for field in (("output.pred", name) if name == "output" else (name,))
)
"""Fields that may hold the prediction, by precedence. The nested "output.pred" (FlashRAG) precedes "output"."""
COUNT_FIELDS = (
    "turns",
    "tokens",
    "prompt_tokens",
    "environment_tokens",
    "reader_prompt_tokens",
    "reader_tokens",
    "seconds",
)
"""Optional numbers of a record that are averaged like metrics. "searches" is another one, given as a number or a list."""

ALLOWED = (
    "records {id or question, prediction}, optionally with titles, retrieval_result, retrieved_docids or searches, turns, tokens "
    f"(the prediction under one of {', '.join(PREDICTION_FIELDS)}), or one object {{id: prediction}}"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """The answer to one question, with what the record has on searches and costs."""

    place: str
    """Place in the file, such as "line 7"."""
    id: str | None
    """Id of the question; None if the record has none."""
    question: str
    """Text of the question, or ""."""
    answers: tuple[str, ...]
    """Usually one answer. Several are short forms of a long answer, of which the best counts. Empty if there is no answer."""
    titles: tuple[str, ...] | None = None
    """Titles of the retrieved passages, best first; None if the record does not have them."""
    ids: tuple[str, ...] | None = None
    """Ids of these passages; None if the record lacks any of them."""
    verdict: bool | None = None
    """Verdict of a judge; None if it cannot be parsed, or there is no judge."""
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Values of `COUNT_FIELDS` and "searches" that the record has."""
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The whole record, which may contain the gold answers too."""
    failed_searches: int = 0
    """Number of searches that the record marks as failed."""
    empty_passages: int = 0
    """Number of retrieved passages with neither title nor text; they are left out of `titles` and `ids`."""


def load_predictions(path: str | Path, field: str = "", judge_field: str = "") -> list[Prediction]:
    """Read a prediction file (see `ALLOWED`): JSON lines or one document, optionally gzipped.

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
            prediction = _prediction(place, record, field, judge_field)
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
            raise UserError(f"{path}, {place}: {error}. Allowed: {ALLOWED}.") from error
        predictions.append(prediction)
    if not predictions:
        raise UserError(f"{path}: the file is empty. Allowed: {ALLOWED}.")
    if empty := sum(prediction.empty_passages for prediction in predictions):
        logging.getLogger(__name__).warning(
            "%s: left out %d passages with neither title nor text", path, empty
        )
    return predictions


def _records(path: str | Path) -> Iterator[tuple[str, Any]]:
    records = list(read_records(path))
    if len(records) == 1 and isinstance(records[0][1], dict):
        answers = _by_id(records[0][1])
        if answers is not None:
            yield from (
                (f"id {name!r}", {"id": name, "prediction": answer}) for name, answer in answers.items()
            )
            return
    yield from records


def _by_id(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answers of a document in SQuAD's format, {id: answer}, or in that of HotpotQA and 2Wiki,
    {"answer": {id: answer}} with supporting facts and evidence; None for a single record."""
    if isinstance(document.get("answer"), dict) and set(document) <= {"answer", "sp", "evidence"}:
        return document["answer"]
    known = {*QUESTION_ID_FIELDS, *QUESTION_FIELDS, *(name.partition(".")[0] for name in PREDICTION_FIELDS)}
    return None if known & document.keys() else document


def _prediction(place: str, record: Any, field: str, judge_field: str) -> Prediction:
    if isinstance(record, BrokenRecord):
        raise ValueError(record.reason)
    fields = question_fields_of(record)
    question_id = (
        id_field(fields, 0) if any(fields.get(name) is not None for name in QUESTION_ID_FIELDS) else None
    )
    question = next((fields[name] for name in QUESTION_FIELDS if isinstance(fields.get(name), str)), "")
    if question_id is None and not question.strip():
        raise ValueError("id: missing, and there is no question either")
    if judge_field and judge_field not in fields:
        raise ValueError(f"{judge_field}: missing")
    titles, ids, empty = _retrieved(fields)
    return Prediction(
        place=place,
        id=question_id,
        question=question,
        answers=_answers(fields, field),
        titles=titles,
        ids=ids,
        verdict=_verdict(fields[judge_field]) if judge_field else None,
        counts=dict(_counts(fields)),
        record=fields,
        failed_searches=_failed_searches(fields),
        empty_passages=empty,
    )


def _answers(fields: dict[str, Any], field: str) -> tuple[str, ...]:
    missing = object()
    for name in (field,) if field else PREDICTION_FIELDS:
        value: Any = fields
        for part in name.split("."):
            value = value.get(part, missing) if isinstance(value, dict) else missing
        if value is missing:
            continue
        return tuple(answer.strip() for answer in _answer_texts(name, value))
    raise ValueError(f"{field or 'prediction'}: missing; found the fields {', '.join(list(fields)[:8])}")


_EXACT_ANSWER = re.compile(r"Exact Answer\**:[ \t*]*(.*)")
"""The answer line that BrowseComp's prompt requests after an explanation."""


def _answer_texts(name: str, value: Any) -> list[str]:
    """Return the answers in a prediction's value.

    The value may be a text, a number, true or false; KILT's [{answer}]; or the messages of an agent, of which the last
    {type: output_text, output} counts (BrowseComp-Plus). true becomes both "yes" and "true", so either gold answer matches.
    """
    texts: list[str] = []
    for answer in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(answer, dict) and answer.get("type") == "output_text":
            text = answer_text(name, answer.get("output", answer.get("text")))
            exact = _EXACT_ANSWER.findall(text)
            texts = [exact[-1].rstrip("* ") if exact else text]
        elif isinstance(answer, dict) and "type" in answer:
            continue  # a tool call, or reasoning
        elif isinstance(answer, dict) and "answer" in answer:
            texts = texts or [answer_text(name, answer["answer"])]  # KILT scores the first
        else:
            texts.append(answer_text(name, answer))
            if isinstance(answer, bool):
                texts.append(str(answer).lower())
    return texts


def _retrieved(fields: dict[str, Any]) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None, int]:
    """Return titles and ids of the retrieved passages, and how many were left out because they have neither title nor text."""
    output = fields.get("output")
    for name, inside in (
        ("titles", fields),
        ("retrieval_result", fields),
        ("retrieval_result", output),
        ("passages", fields),
    ):
        if isinstance(inside, dict) and inside.get(name) is not None:
            entries = list(_entries(list_field(inside, name)))
            passages = [entry for entry in entries if entry is not None]
            titles = tuple(title for title, _ in passages)
            return titles, _complete([passage_id for _, passage_id in passages]), len(entries) - len(passages)
    searches = fields.get("searches")
    if isinstance(searches, list):
        each = [fields_of(search) for search in searches]
        titles = tuple(t for search in each for t in list_field(search, "titles") if isinstance(t, str))
        ids = [str(passage_id) for search in each for passage_id in list_field(search, "ids")]
        return titles, tuple(ids) if len(ids) == len(titles) else None, 0
    if fields.get("retrieved_docids") is not None:  # BrowseComp-Plus
        return None, tuple(map(str, list_field(fields, "retrieved_docids"))), 0
    return None, None, 0


def _complete(ids: list[str]) -> tuple[str, ...] | None:
    return tuple(ids) if all(ids) else None


def _entries(entries: list[Any]) -> Iterator[tuple[str, str] | None]:
    """Yield title and id ("" if it has none) of each entry, or None for a passage with neither title nor text.

    An entry is a title, a passage, or the list of either that one search returned.
    """
    for at, entry in enumerate(entries):
        if isinstance(entry, str):
            yield entry, ""
        elif isinstance(entry, list):
            yield from _entries(entry)
        else:
            try:
                passage = passage_of(at, entry)
                has_id = any(entry.get(name) is not None for name in PASSAGE_ID_FIELDS)
                yield passage.title, passage.id if has_id else ""
            except ExcludedRecord:
                yield None


def _verdict(value: Any) -> bool | None:
    words = {"true": True, "1": True, "yes": True, "correct": True, "false": False, "0": False, "no": False}
    words |= {"1.0": True, "0.0": False, "wrong": False, "incorrect": False}
    return words.get(str(value).strip().strip('."').lower())


def _failed_searches(fields: dict[str, Any]) -> int:
    searches = fields.get("searches")
    listed = searches if isinstance(searches, list) else ()
    return sum(isinstance(one, dict) and one.get("failed") is True for one in listed)


def _counts(fields: dict[str, Any]) -> Iterator[tuple[str, float]]:
    searches = fields.get("searches")
    if isinstance(searches, list):
        yield "searches", float(len(searches))
    for name in ("searches", *COUNT_FIELDS):
        value = fields.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: got {value}, not a finite number of at least 0")
            yield name, float(value)
