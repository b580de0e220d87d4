"""Read the records of a data file: JSON lines, one JSON document or a table; plain, gzip or bzip2. Read `parse_records` first.

The format is detected by content: compression by its magic bytes, JSON by its first characters. Files named `.jsonl`, `.tsv` or
`.csv` (before `.gz` or `.bz2`) are the exception: they are read as their name says. A record that cannot be read is yielded as
a `BrokenRecord`, for which the caller raises an error, or which it skips. A lone surrogate in a JSON escape is read as "?".
"""

import ast
import collections
import io
import itertools
import json
import logging
import re
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from rrl.data.decoding import BrokenRecord, decode, decompressed_name, open_decompressed
from rrl.data.tables import QUESTION_ID_FIELDS, read_table
from rrl.errors import UserError
from rrl.text.characters import replace_lone_surrogates

OnError = Literal["refuse", "skip"]
"""How to treat a broken record: "refuse" raises UserError for its file, "skip" skips the record."""
OnFault = Literal["refuse", "skip", "stop"]
"""How a run treats broken records and questions whose prompt is too long for the context.

- Broken record: "refuse" and "stop" raise UserError for the file, "skip" skips the record.
- Prompt too long: "stop" raises UserError before the run starts. With "refuse" and "skip" the episode ends as "context_limit"."""
T = TypeVar("T")

RECORD_LIST_FIELDS = ("Data", "data", "queries", "questions", "examples")
"""Fields of a JSON object that may hold the records of the file as a list."""

TABLE_ENDINGS = (".tsv", ".csv")
"""Endings of tables."""

MAX_NAMED_LINES = 5
"""Number of broken records that a log line names; the others are only counted."""


def on_error_for(on_fault: OnFault) -> OnError:
    """Return the `OnError` of a run with this `on_fault`."""
    return "skip" if on_fault == "skip" else "refuse"


class ExcludedRecord(ValueError):
    """A valid record that cannot be used, such as a document without title and text, or an unanswerable question."""


def read_records(path: str | Path, columns: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (place, record) for each record of a file.

    The place is "line 7" or "record 7", counted from 1. The record is a decoded value or a `BrokenRecord`. Empty lines are
    skipped. A single JSON object may hold many records:
    - {title: [sentences], ...} yields (title, sentences) pairs;
    - {id: {question or answer ...}, ...} yields the inner objects with their id;
    - an object with a list of objects in one of `RECORD_LIST_FIELDS` yields that list.

    Args:
      path: the file.
      columns: the meaning of a table's columns, if its header does not name them (see `read_table`).

    Raises:
      UserError: the file cannot be opened or decoded, `columns` are given for a file that is not a table, or as `read_table`.
    """
    path = Path(path)
    ending = Path(decompressed_name(path)).suffix
    if columns and ending not in TABLE_ENDINGS:
        raise UserError(
            f"columns={','.join(columns)}: {path} is not a table; columns are allowed for {' and '.join(TABLE_ENDINGS)} files"
        )
    try:
        with open_decompressed(path) as stream:
            if ending in TABLE_ENDINGS:
                yield from read_table(path, stream, columns)
            elif ending == ".jsonl":
                yield from _json_lines(stream)
            else:
                yield from _json_any(path, stream)
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}). Give an existing, complete file, plain, gzip or bzip2."
        ) from error


def load_records(
    path: str | Path,
    parse: Callable[[int, Any], T],
    allowed: str,
    on_error: OnError,
    skipped: list[str] | None,
) -> list[T]:
    """Return a list of one item per record, as `parse_records`."""
    return list(parse_records(path, lambda at, record: (parse(at, record),), allowed, on_error, skipped))


def parse_records(
    path: str | Path,
    parse: Callable[[int, Any], Iterable[T]],
    allowed: str,
    on_error: OnError,
    skipped: list[str] | None = None,
    excluded: list[str] | None = None,
    columns: Sequence[str] = (),
) -> Iterator[T]:
    """Yield the items of every record of a file.

    Args:
      path: the file.
      parse: returns the items of a record from its position (from 0) and its value. It raises ValueError for a broken record
        and `ExcludedRecord` for a valid record that is never used.
      allowed: the allowed formats, for error messages.
      on_error: "refuse" raises UserError at the first broken record, with file, place, reason and `allowed`; "skip" skips
        broken records and logs their number.
      skipped: if given, receives "place: reason" for each broken record.
      excluded: if given, receives the same for each excluded record; their number is logged too.
      columns: as in `read_records`.

    Raises:
      UserError: as above, and if the file yields no item.
    """
    if on_error not in ("refuse", "skip"):
        raise UserError(f"on_error: got {on_error!r}; allowed are 'refuse' and 'skip'.")
    count = total = 0
    broken, unused = _RecordLog(skipped), _RecordLog(excluded)
    for position, (place, record) in enumerate(read_records(path, columns)):
        total += 1
        try:
            if isinstance(record, BrokenRecord):
                raise ValueError(record.reason)
            items = list(parse(position, record))
        except ExcludedRecord as error:
            unused.add(f"{place}: {error}")
            continue
        except ValueError as error:
            if on_error == "refuse":
                raise UserError(
                    f"{path}, {place}: {error}. Allowed: {allowed}. "
                    "Repair the file, or skip its broken records: --config.data.on_error=skip for a run, --skip_broken for "
                    "launch/build_index.py, on_error='skip' in Python."
                ) from error
            broken.add(f"{place}: {error}")
            continue
        count += len(items)
        yield from items
    if not count:
        problem = "the file is empty: it has no records"
        if broken.count:
            problem = f"all {broken.count} records are broken (first: {broken.first[0]})"
        if unused.count:
            problem = f"none of its {total} records can be used (first: {[*broken.first, *unused.first][0]})"
        raise UserError(f"{path}: {problem}. Allowed: {allowed}.")
    for event, records in (("skipped %d broken records", broken), ("excluded %d records", unused)):
        if records.count:
            more = "; ..." if records.count > len(records.first) else ""
            logging.getLogger(__name__).warning(
                f"%s: {event} of %d (%s%s)", path, records.count, total, "; ".join(records.first), more
            )


class _RecordLog:
    """Counts records that are not yielded and stores the first `MAX_NAMED_LINES`. The caller's list, if given, receives all."""

    def __init__(self, entries: list[str] | None) -> None:
        """`entries`: the caller's list, which receives every entry, or None."""
        self.count, self.first = 0, list[str]()
        self._entries = entries

    def add(self, entry: str) -> None:
        """Add an entry, "place: reason"."""
        self.count += 1
        if len(self.first) < MAX_NAMED_LINES:
            self.first.append(entry)
        if self._entries is not None:
            self._entries.append(entry)


def fields_of(record: Any) -> dict[str, Any]:
    """Return the record as a mapping. Raises ValueError if it is not one."""
    if not isinstance(record, dict):
        raise ValueError(f"got {_short(record)}, not an object with named fields")
    return record


def question_fields_of(record: Any) -> dict[str, Any]:
    """Return the fields of a record, with a nested question merged into the top level.

    In results.jsonl and trajectories.jsonl the field `question` is an object. Its fields replace those of the record, and the
    record's own `answer`, which the model gave, becomes `prediction`. Other records are unchanged. Raises ValueError as
    `fields_of`.
    """
    record = fields_of(record)
    question = record.get("question")
    if isinstance(question, dict) and isinstance(question.get("text"), str):
        others = {name: value for name, value in record.items() if name != "answer"}
        prediction = {"prediction": record["answer"]} if "answer" in record else {}
        return {**prediction, **others, **question, "question": question["text"]}
    return record


def text_field(record: dict[str, Any], *names: str) -> str:
    """Return the first of the named fields that the record has. Raises ValueError unless it is a non-empty string."""
    for name in names:
        if name in record:
            value = record[name]
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name}: got {_short(value)}, not a non-empty string")
            return value.strip()
    present = ", ".join(list(map(str, record))[:8]) + (", ..." if len(record) > 8 else "")
    raise ValueError(f"{' or '.join(names)}: missing; found the fields {present or '(none)'}")


def list_field(record: dict[str, Any], name: str) -> list[Any]:
    """Return a list in a field, or [] if the field is missing or null.

    Tables hold lists as text (see `list_in_text`). Raises ValueError if the value is not a list.
    """
    value = record.get(name)
    if isinstance(value, str):
        try:
            value = list_in_text(value) if value.strip() else None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        value = record[name] if value is None and record[name].strip() else value
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{name}: got {_short(value)}, not a list")
    return value or []


def list_in_text(text: str) -> list[Any] | None:
    """Return the list that a text holds in JSON or Python syntax; None if the text is not in brackets.

    Raises ValueError if it cannot be parsed, such as the text of a NumPy array, which has no commas between its strings.
    """
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return None
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        parsed = ast.literal_eval(text)
        separated = not re.search(r"""["']\s+[A-Za-z]{0,2}["']""", text) or _no_adjacent_strings(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError):
        parsed = separated = None
    if not isinstance(parsed, list) or not separated:
        raise ValueError(f"got {_short(text)}, not a list in JSON or Python")
    return parsed


def _no_adjacent_strings(text: str) -> bool:
    """Return whether every two strings of a Python literal have a comma between them; Python joins adjacent strings."""
    kinds = [token.type for token in tokenize.generate_tokens(io.StringIO(text).readline)]
    kinds = [kind for kind in kinds if kind not in (tokenize.NL, tokenize.NEWLINE)]
    return not any(a == b == tokenize.STRING for a, b in itertools.pairwise(kinds))


def id_field(record: dict[str, Any], position: int, names: Sequence[str] = QUESTION_ID_FIELDS) -> str:
    """Return the first of the named fields with a value, as a string, or the position in the file if none has a value."""
    value = next((record[name] for name in names if record.get(name) is not None), position)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"id: got {_short(value)}, not a string or an integer")
    return str(value)


def record_places(path: str | Path, identity: str) -> list[str]:
    """Return the places ("line 7", ...) of all records with this id in a file. The id of a record without one is its position."""
    places = []
    for position, (place, record) in enumerate(read_records(path)):
        try:
            if id_field(fields_of(record), position) == identity:
                places.append(place)
        except ValueError:
            continue  # a broken record has no id
    return places


def _short(value: Any) -> str:
    """Return at most 60 characters of a value's representation, for error messages."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _parse(text: str) -> Any:
    """Parse a JSON text; return a `BrokenRecord` if it is invalid."""
    try:
        value = json.loads(text, object_pairs_hook=_unique_names)
        return _without_lone_surrogates(value) if "\\ud" in text.lower() else value
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 or "\n" in text.strip() else ""
        return BrokenRecord(f"not JSON ({error.msg}: {line}column {error.colno})")
    except _DuplicateName as error:
        return BrokenRecord(f"{error.name!r} occurs twice in one object{_second_place(text, error.name)}")
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


def _second_place(text: str, name: str) -> str:
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


def _json_lines(stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yield the record of each non-empty line."""
    for number, line in enumerate(stream, 1):
        text = decode(line)
        if isinstance(text, BrokenRecord):
            yield f"line {number}", text
        elif text.strip():
            yield f"line {number}", _parse(text.rstrip())


def _json_any(path: Path, stream: BinaryIO) -> Iterator[tuple[str, Any]]:
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
        yield from _json_lines(stream)
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
