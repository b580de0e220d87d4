"""Read the records of JSON files: JSON lines, one JSON list or one JSON object with many records. Read `json_any` first."""

import collections
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rrl.data.decoding import BrokenRecord, decode
from rrl.errors import UserError
from rrl.text.characters import replace_lone_surrogates

RECORD_LIST_FIELDS = ("Data", "data", "queries", "questions", "examples")
"""Fields of a JSON object that may hold the records of the file as a list."""


def json_lines(stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yield the record of each non-empty line."""
    for number, line in enumerate(stream, 1):
        text = decode(line)
        if isinstance(text, BrokenRecord):
            yield f"line {number}", text
        elif text.strip():
            yield f"line {number}", _parse(text.rstrip())


def json_any(path: Path, stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yield the records of one JSON list, of one JSON object with many records (see `_records_in_object`), or of JSON lines."""
    first = stream.readline()
    while first and not first.strip():
        first = stream.readline()
    first_text = decode(first)
    begins_object = isinstance(first_text, str) and first_text.lstrip().startswith("{")
    first_object = _parse(str(first_text)) if begins_object else None
    second = stream.readline() if isinstance(first_object, dict) else b""
    stream.seek(0)
    # JSON lines: the first line is a whole object, and another line follows or the object is itself a record.
    if isinstance(first_object, dict) and (second.strip() or _records_in_object(first_object) is None):
        yield from json_lines(stream)
        return
    text = decode(stream.read())
    document = text if isinstance(text, BrokenRecord) else _parse(text) if text.strip() else []
    if isinstance(document, BrokenRecord):
        raise UserError(
            f"{path}: {document.reason}. Allowed: JSON lines, one JSON list, or one JSON object of "
            "{title: [sentences]}, in UTF-8."
        )
    entries = document if isinstance(document, list) else None
    if isinstance(document, dict):
        entries = _records_in_object(document)
    for number, entry in enumerate([document] if entries is None else entries, 1):
        yield f"record {number}", entry


def _records_in_object(document: dict[str, Any]) -> list[Any] | None:
    """Return the records that a JSON object holds; None if it is a record itself."""
    for name in RECORD_LIST_FIELDS:
        inner = document.get(name)
        if isinstance(inner, list) and inner and all(isinstance(entry, dict) for entry in inner):
            return [question for entry in inner for question in _squad_questions(entry)]
    values = document.values()
    if document and all(isinstance(value, list) for value in values):
        return list(document.items())
    if document and all(
        isinstance(value, dict) and {"question", "answer"} & value.keys() for value in values
    ):
        return [{"id": name, **value} for name, value in document.items()]
    return None


def _squad_questions(article: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the questions of an article in SQuAD's file, each with its title and context; any other record unchanged."""
    paragraphs = article.get("paragraphs")
    if not isinstance(paragraphs, list):
        return [article]
    parts = [part for part in paragraphs if isinstance(part, dict) and isinstance(part.get("qas"), list)]
    if not parts or len(parts) < len(paragraphs):
        return [article]
    article_fields = {"title": article.get("title")}
    return [
        article_fields | {"context": part.get("context")} | question
        for part in parts
        for question in part["qas"]
        if isinstance(question, dict)
    ]


def _parse(text: str) -> Any:
    """Parse a JSON text; return a `BrokenRecord` if it is invalid."""
    try:
        value = json.loads(text, object_pairs_hook=_unique_names)
        return _without_lone_surrogates(value) if "\\ud" in text.lower() else value
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 or "\n" in text.strip() else ""
        return BrokenRecord(f"not JSON ({error.msg}: {line}column {error.colno})")
    except _DuplicateName as error:
        return BrokenRecord(f"{error.name!r} occurs twice in one object{_line_of_second(text, error.name)}")
    except (ValueError, RecursionError) as error:
        return BrokenRecord(str(error))


def _without_lone_surrogates(value: Any) -> Any:
    """Return a JSON value with lone surrogates replaced in all texts, so that they can be encoded as UTF-8."""
    if isinstance(value, str):
        return replace_lone_surrogates(value)
    if isinstance(value, list):
        return [_without_lone_surrogates(part) for part in value]
    if isinstance(value, dict):
        return {
            _without_lone_surrogates(name): _without_lone_surrogates(part) for name, part in value.items()
        }
    return value


class _DuplicateName(ValueError):
    """A name that occurs twice in one JSON object."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _line_of_second(text: str, name: str) -> str:
    """Return " (line N)" for the second occurrence of a name in a JSON document, or "" if that is ambiguous or line 1."""
    places = [match.start() for match in re.finditer(re.escape(json.dumps(name)) + r"\s*:", text)]
    line = text.count("\n", 0, places[-1]) + 1 if len(places) == 2 else 1
    return f" (line {line})" if line > 1 else ""


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Raises `_DuplicateName` if a name occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        (repeated, _), *_ = collections.Counter(name for name, _ in pairs).most_common(1)
        raise _DuplicateName(repeated)
    return fields
