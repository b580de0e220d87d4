"""Prediction files: what a model answered to each question, in our form and those of FlashRAG, HotpotQA and R1-Searcher."""

import dataclasses
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rrl.data.decoding import BrokenRecord
from rrl.data.passages import passage_of
from rrl.data.questions import QUESTION_FIELDS, answer_text
from rrl.data.records import ExcludedRecord, fields_of, id_field, list_field, question_fields_of, read_records
from rrl.data.tables import PASSAGE_IDS, PREDICTIONS, QUESTION_IDS
from rrl.errors import UserError

PREDICTION_FIELDS = tuple(
    part for name in PREDICTIONS for part in (("output.pred", name) if name == "output" else (name,))
)
COUNT_FIELDS = (
    "turns",
    "tokens",
    "prompt_tokens",
    "environment_tokens",
    "reader_prompt_tokens",
    "reader_tokens",
    "seconds",
)
"""Numbers of a record that are averaged beside the metrics, where they are there; "searches" too, as a number or a list."""

ALLOWED = (
    "records {id or question, prediction} with titles, retrieval_result, retrieved_docids or searches, turns, tokens where known "
    f"(the prediction under one of {', '.join(PREDICTION_FIELDS)}), or one object {{id: prediction}}"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """What was answered to one question."""

    place: str
    """ "line 7" of its file."""
    id: str | None
    """None where the record has none."""
    question: str
    """Its text, or ""."""
    answers: tuple[str, ...]
    """One answer; several where they are the short forms of a long one (the best counts); none where nothing was answered."""
    titles: tuple[str, ...] | None = None
    """Titles of the passages that were found, best first; None where the record does not say."""
    ids: tuple[str, ...] | None = None
    """Ids of these passages; None where the record does not say all of them."""
    verdict: bool | None = None
    """What a judge said; None where it can't be understood, or no judge was asked for."""
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """All of it, for gold answers that stand beside the prediction."""
    failed: int = 0
    """Searches that failed, where the record says so."""
    empty: int = 0
    """Passages that were found and have neither title nor text; they are not among `titles` and `ids`."""


def load_predictions(path: str | Path, field: str = "", judge_field: str = "") -> list[Prediction]:
    """Reads a prediction file (see `ALLOWED`), JSON lines or one document, gzipped or not.

    Args:
      path: the file.
      field: name of the prediction in a record, "output.pred" for one inside another; "": the first of `PREDICTION_FIELDS`.
      judge_field: name of a judge's verdict in a record, true or false; "": none.

    Raises UserError with the line for a record that cannot be read, has no prediction, has neither id nor question, or has no id
    where others have one; and, with both lines, for an id that comes twice, or without ids a whole record.
    """
    found: list[Prediction] = []
    first: dict[str, str] = {}
    for place, record in _records(path):
        try:
            prediction = _prediction(place, record, field, judge_field)
            if found and (prediction.id is None) != (found[0].id is None):
                has, lacks = (found[0], prediction) if prediction.id is None else (prediction, found[0])
                raise ValueError(f"id: missing at {lacks.place}, while {has.place} has {has.id!r}")
            key = json.dumps(record, sort_keys=True) if prediction.id is None else prediction.id
            if key in first:
                what = "the same record" if prediction.id is None else f"id: {prediction.id!r}"
                raise ValueError(f"{what} is there twice, first at {first[key]}")
            first[key] = place
        except ValueError as error:
            raise UserError(f"{path}, {place}: {error}. Allowed: {ALLOWED}.") from error
        found.append(prediction)
    if not found:
        raise UserError(f"{path}: the file is empty. Allowed: {ALLOWED}.")
    if empty := sum(prediction.empty for prediction in found):
        logging.getLogger(__name__).warning(
            "%s: left out %d passages with neither title nor text", path, empty
        )
    return found


def _records(path: str | Path) -> Iterator[tuple[str, Any]]:
    records = list(read_records(path))
    if len(records) == 1 and isinstance(records[0][1], dict):
        answers = _by_id(records[0][1])
        if answers is not None:
            yield from ((f"id {name!r}", {"id": name, "prediction": said}) for name, said in answers.items())
            return
    yield from records


def _by_id(document: dict[str, Any]) -> dict[str, Any] | None:
    """The answers of a document of SQuAD's form, {id: answer}, or HotpotQA's and 2Wiki's,
    {"answer": {id: answer}} beside supporting facts and evidence; None for a record."""
    if isinstance(document.get("answer"), dict) and set(document) <= {"answer", "sp", "evidence"}:
        return document["answer"]
    known = {*QUESTION_IDS, *QUESTION_FIELDS, *(name.partition(".")[0] for name in PREDICTION_FIELDS)}
    return None if known & document.keys() else document


def _prediction(place: str, record: Any, field: str, judge_field: str) -> Prediction:
    if isinstance(record, BrokenRecord):
        raise ValueError(record.reason)
    fields = question_fields_of(record)
    identity = id_field(fields, 0) if any(fields.get(name) is not None for name in QUESTION_IDS) else None
    question = next((fields[name] for name in QUESTION_FIELDS if isinstance(fields.get(name), str)), "")
    if identity is None and not question.strip():
        raise ValueError("id: missing, and there is no question either")
    if judge_field and judge_field not in fields:
        raise ValueError(f"{judge_field}: missing")
    titles, ids, empty = _found(fields)
    return Prediction(
        place=place,
        id=identity,
        question=question,
        answers=_answers(fields, field),
        titles=titles,
        ids=ids,
        verdict=_verdict(fields[judge_field]) if judge_field else None,
        counts=dict(_counts(fields)),
        record=fields,
        failed=_failed(fields),
        empty=empty,
    )


def _answers(fields: dict[str, Any], field: str) -> tuple[str, ...]:
    missing = object()
    for name in (field,) if field else PREDICTION_FIELDS:
        value: Any = fields
        for part in name.split("."):
            value = value.get(part, missing) if isinstance(value, dict) else missing
        if value is missing:
            continue
        return tuple(answer.strip() for answer in _said(name, value))
    raise ValueError(f"{field or 'prediction'}: missing; found the fields {', '.join(list(fields)[:8])}")


_EXACT_ANSWER = re.compile(r"Exact Answer\**:[ \t*]*(.*)")
"""The line that BrowseComp's prompt asks for beside an explanation."""


def _said(name: str, value: Any) -> list[str]:
    """The answers of a prediction's value: texts, numbers, true and false; KILT's [{answer}]; the texts of an agent's last
    message, {type: output_text, output} (BrowseComp-Plus).

    true is "yes" or "true", whichever the gold answer is.
    """
    found: list[str] = []
    for answer in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(answer, dict) and answer.get("type") == "output_text":
            text = answer_text(name, answer.get("output", answer.get("text")))
            exact = _EXACT_ANSWER.findall(text)
            found = [exact[-1].rstrip("* ") if exact else text]
        elif isinstance(answer, dict) and "type" in answer:
            continue  # a tool call, or reasoning
        elif isinstance(answer, dict) and "answer" in answer:
            found = found or [answer_text(name, answer["answer"])]  # KILT scores the first
        else:
            found.append(answer_text(name, answer))
            if isinstance(answer, bool):
                found.append(str(answer).lower())
    return found


def _found(fields: dict[str, Any]) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None, int]:
    """Titles and ids of what was found, and how many passages are left out since they have neither title nor text."""
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
            return titles, _whole([identity for _, identity in passages]), len(entries) - len(passages)
    searches = fields.get("searches")
    if isinstance(searches, list):
        each = [fields_of(search) for search in searches]
        titles = tuple(t for search in each for t in list_field(search, "titles") if isinstance(t, str))
        ids = [str(identity) for search in each for identity in list_field(search, "ids")]
        return titles, tuple(ids) if len(ids) == len(titles) else None, 0
    if fields.get("retrieved_docids") is not None:  # BrowseComp-Plus
        return None, tuple(map(str, list_field(fields, "retrieved_docids"))), 0
    return None, None, 0


def _whole(ids: list[str]) -> tuple[str, ...] | None:
    return tuple(ids) if all(ids) else None


def _entries(entries: list[Any]) -> Iterator[tuple[str, str] | None]:
    """Title and id ("" without one) of each entry: of a title, a passage, or a list of either for each search; None for a passage
    without title and text."""
    for at, entry in enumerate(entries):
        if isinstance(entry, str):
            yield entry, ""
        elif isinstance(entry, list):
            yield from _entries(entry)
        else:
            try:
                passage = passage_of(at, entry)
                own = any(entry.get(name) is not None for name in PASSAGE_IDS)
                yield passage.title, passage.id if own else ""
            except ExcludedRecord:
                yield None


def _verdict(value: Any) -> bool | None:
    words = {"true": True, "1": True, "yes": True, "correct": True, "false": False, "0": False, "no": False}
    words |= {"1.0": True, "0.0": False, "wrong": False, "incorrect": False}
    return words.get(str(value).strip().strip('."').lower())


def _failed(fields: dict[str, Any]) -> int:
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
