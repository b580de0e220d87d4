"""Predictions: a model's answer to each question, parsed from a record of rrl, FlashRAG, HotpotQA, R1-Searcher or others.

Read `Prediction` and `parse_prediction` first; `rrl.eval.prediction_files` reads a file of records.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rrl.data.decoding import BrokenRecord
from rrl.data.field_names import PASSAGE_ID_FIELDS, PREDICTION_NAMES, QUESTION_FIELDS, QUESTION_ID_FIELDS
from rrl.data.fields import fields_of, id_field, list_field, question_fields_of
from rrl.data.gold_answers import answer_text
from rrl.data.passages import passage_of
from rrl.data.records import ExcludedRecord

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


def parse_prediction(place: str, record: Any, field: str = "", judge_field: str = "") -> Prediction:
    """Return the prediction in a record. `field` and `judge_field`: see `rrl.eval.prediction_files.load_predictions`.

    Raises ValueError for a record that cannot be read, or lacks the prediction, the verdict, or both id and question.
    """
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
    """Return the answers in `field`, or in the first of `PREDICTION_FIELDS` that the record has."""
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
    for name, container in (
        ("titles", fields),
        ("retrieval_result", fields),
        ("retrieval_result", output),
        ("passages", fields),
    ):
        if isinstance(container, dict) and container.get(name) is not None:
            entries = list(_entries(list_field(container, name)))
            passages = [entry for entry in entries if entry is not None]
            titles = tuple(title for title, _ in passages)
            ids = tuple(passage_id for _, passage_id in passages)
            return titles, ids if all(ids) else None, len(entries) - len(passages)
    searches = fields.get("searches")
    if isinstance(searches, list):
        searches = [fields_of(search) for search in searches]
        titles = tuple(t for search in searches for t in list_field(search, "titles") if isinstance(t, str))
        ids = tuple(str(passage_id) for search in searches for passage_id in list_field(search, "ids"))
        return titles, ids if len(ids) == len(titles) else None, 0
    if fields.get("retrieved_docids") is not None:  # BrowseComp-Plus
        return None, tuple(map(str, list_field(fields, "retrieved_docids"))), 0
    return None, None, 0


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
    word = str(value).strip().strip('."').lower()
    if word in ("true", "1", "1.0", "yes", "correct"):
        return True
    return False if word in ("false", "0", "0.0", "no", "wrong", "incorrect") else None


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
