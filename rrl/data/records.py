"""Records of a data file whatever its container: JSON lines, one JSON document or a table, gzipped or not.

The content decides: gzip by its magic bytes, JSON by its first characters; only `.jsonl`, `.tsv` and `.csv` (before `.gz`)
are believed by name. A record that cannot be read is yielded as a `Broken`, so that the caller refuses or skips it. Half a
character, which an escape of JSON may stand for, is read as "?".
"""

import collections
import csv
import dataclasses
import gzip
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from rrl.errors import UserError
from rrl.text.characters import whole_characters

OnError = Literal["refuse", "skip"]
T = TypeVar("T")

LISTS = ("Data", "data", "queries", "questions", "examples")
"""Fields of a JSON document under which publishers put their list of records."""

MAX_NAMED_LINES = 5
"""How many broken places a log line names; the rest is counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Broken:
    """A record that could not be read."""

    reason: str


def read_records(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, record): place is "line 7" or "record 7" (from 1), record a decoded value or `Broken`.

    Empty lines are passed over. A JSON object of {title: [sentences]} yields ("record i", (title, sentences)), one of
    {id: {question or answer ...}} those objects with the id in them, and one with a list of objects under a name of `LISTS`
    that list.
    Raises UserError if the file cannot be opened or holds no readable text at all.
    """
    path = Path(path)
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    try:
        with _open(path) as stream:
            if suffixes[-1:] in ([".tsv"], [".csv"]):
                yield from _table(stream, "\t" if suffixes[-1] == ".tsv" else ",")
            elif suffixes[-1:] == [".jsonl"]:
                yield from _json_lines(stream)
            else:
                yield from _json_any(path, stream)
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}). Give an existing, complete file, plain or gzip."
        ) from error


def load_records(
    path: str | Path,
    parse: Callable[[int, Any], T],
    allowed: str,
    on_error: OnError,
    skipped: list[str] | None,
) -> list[T]:
    """What `parse_records` yields, as a list."""
    return list(parse_records(path, lambda at, record: (parse(at, record),), allowed, on_error, skipped))


def parse_records(
    path: str | Path,
    parse: Callable[[int, Any], Iterable[T]],
    allowed: str,
    on_error: OnError,
    skipped: list[str] | None = None,
) -> Iterator[T]:
    """Yield the items of every record by `parse(position, record)`, whose ValueError marks the record as broken.

    Broken records are refused (UserError naming file, place, reason and `allowed`) or skipped: then each is
    appended to `skipped` as "place: reason" and their number is logged. A file without an item is refused.
    """
    if on_error not in ("refuse", "skip"):
        raise UserError(f"on_error: got {on_error!r}; allowed are 'refuse' and 'skip'.")
    count = bad = position = 0
    named: list[str] = []
    for position, (place, record) in enumerate(read_records(path)):
        try:
            if isinstance(record, Broken):
                raise ValueError(record.reason)
            items = list(parse(position, record))
        except ValueError as error:
            if on_error == "refuse":
                raise UserError(
                    f"{path}, {place}: {error}. Allowed: {allowed}. "
                    "Repair the file, or skip its broken records where that can be asked for: --config.data.on_error=skip of a "
                    "run, --skip_broken of launch/build_index.py, on_error='skip' in Python."
                ) from error
            bad += 1
            if len(named) < MAX_NAMED_LINES:
                named.append(f"{place}: {error}")
            if skipped is not None:
                skipped.append(f"{place}: {error}")
            continue
        count += len(items)
        yield from items
    if not count:
        found = f"all {bad} records are broken (first: {named[0]})" if bad else "the file is empty"
        raise UserError(f"{path}: {found}. Allowed: {allowed}.")
    if bad:
        more = "; ..." if bad > len(named) else ""
        logging.getLogger(__name__).warning(
            "%s: skipped %d broken records of %d (%s%s)", path, bad, position + 1, "; ".join(named), more
        )


def fields_of(record: Any) -> dict[str, Any]:
    """The record as a mapping; ValueError if it is none."""
    if not isinstance(record, dict):
        raise ValueError(f"got {_short(record)}, not an object with named fields")
    return record


def text_field(record: dict[str, Any], *names: str) -> str:
    """The first of the named fields that is there, which must be a string with something in it."""
    for name in names:
        if name in record:
            value = record[name]
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name}: got {_short(value)}, not a non-empty string")
            return value.strip()
    found = ", ".join(list(map(str, record))[:8]) + (", ..." if len(record) > 8 else "")
    raise ValueError(f"{' or '.join(names)}: missing; found the fields {found or '(none)'}")


def list_field(record: dict[str, Any], name: str) -> list[Any]:
    """The named list; empty where the field is missing or null."""
    value = record.get(name)
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{name}: got {_short(value)}, not a list")
    return value or []


ID_FIELDS = ("id", "_id", "question_id", "QuestionId")


def id_field(record: dict[str, Any], position: int) -> str:
    """The first of `ID_FIELDS` as a string; the position in the file where there is none."""
    value = next((record[name] for name in ID_FIELDS if name in record), position)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"id: got {_short(value)}, not a string or an integer")
    return str(value)


def places_of(path: str | Path, identity: str) -> list[str]:
    """Where in a file the records with an id stand: "line 7", ...; a record without an id has its position."""
    places = []
    for position, (place, record) in enumerate(read_records(path)):
        try:
            if id_field(fields_of(record), position) == identity:
                places.append(place)
        except ValueError:
            continue  # a broken record is no question
    return places


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _open(path: Path) -> BinaryIO:
    stream = path.open("rb")
    zipped = stream.read(2) == b"\x1f\x8b"
    stream.seek(0)
    return gzip.open(stream) if zipped else stream  # type: ignore[return-value]


def _decode(line: bytes) -> str | Broken:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Broken(f"not UTF-8 (byte {error.start + 1} of the line)")


def _parse(text: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=_object)
        return _whole(value) if "\\ud" in text.lower() else value
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 or "\n" in text.strip() else ""
        return Broken(f"not JSON ({error.msg}: {line}column {error.colno})")
    except _Twice as error:
        return Broken(f"{error.name!r} is there twice in one object{_second(text, error.name)}")
    except (ValueError, RecursionError) as error:
        return Broken(str(error))


def _whole(value: Any) -> Any:
    """The value, whose texts can be written down again: an escape may stand for half a character."""
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, list):
        return [_whole(part) for part in value]
    if isinstance(value, dict):
        return {_whole(name): _whole(part) for name, part in value.items()}
    return value


class _Twice(ValueError):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _second(text: str, name: str) -> str:
    """Where a name of an object of several lines stands again; nothing where other objects have it too."""
    places = [found.start() for found in re.finditer(re.escape(json.dumps(name)) + r"\s*:", text)]
    line = text.count("\n", 0, places[-1]) + 1 if len(places) == 2 else 1
    return f" (line {line})" if line > 1 else ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = collections.Counter(name for name, _ in pairs).most_common(1)
        raise _Twice(twice)
    return found


def _json_lines(stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(stream, 1):
        text = _decode(line)
        if isinstance(text, Broken):
            yield f"line {number}", text
        elif text.strip():
            yield f"line {number}", _parse(text.rstrip())


def _json_any(path: Path, stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    """One JSON list, one JSON object of {title: sentences}, or JSON lines."""
    first = stream.readline()
    while first and not first.strip():
        first = stream.readline()
    head = _decode(first)
    alone = _parse(head) if isinstance(head, str) and head.lstrip().startswith("{") else None
    more = stream.readline() if isinstance(alone, dict) else b""
    stream.seek(0)
    if isinstance(alone, dict) and (more.strip() or _entries(alone) is None):
        yield from _json_lines(stream)
        return
    text = _decode(stream.read())
    document = text if isinstance(text, Broken) else _parse(text) if text.strip() else []
    if isinstance(document, Broken):
        raise UserError(
            f"{path}: {document.reason}. Allowed: JSON lines, one JSON list, or one JSON object of "
            "{title: [sentences]}, in UTF-8."
        )
    entries = document if isinstance(document, list) else None
    if isinstance(document, dict):
        entries = _entries(document)
    for number, entry in enumerate([document] if entries is None else entries, 1):
        yield f"record {number}", entry


def _entries(document: dict[str, Any]) -> list[Any] | None:
    """The records of a JSON object that holds many; None where it is a record itself."""
    for name in LISTS:
        inner = document.get(name)
        if isinstance(inner, list) and inner and all(isinstance(entry, dict) for entry in inner):
            return inner
    values = document.values()
    if document and all(isinstance(value, list) for value in values):
        return list(document.items())
    if document and all(
        isinstance(value, dict) and {"question", "answer"} & value.keys() for value in values
    ):
        return [{"id": name, **value} for name, value in document.items()]
    return None


def _table(stream: BinaryIO, delimiter: str) -> Iterator[tuple[str, Any]]:
    """A record a line, texts in doubled quotes: DPR's psgs_w100.tsv ("id, text, title"), PopQA's TSV, Bamboogle's CSV.

    The first line names the columns if one of them is a text or a question; else they are DPR's.
    """
    names = ["id", "text", "title"]
    for number, line in enumerate(stream, 1):
        text = _decode(line)
        if isinstance(text, Broken):
            yield f"line {number}", text
            continue
        if not text.strip():
            continue
        cells = next(csv.reader([text.rstrip("\r\n")], delimiter=delimiter))
        if number == 1 and {"text", "question"} & {cell.strip().lower() for cell in cells}:
            names = [cell.strip() for cell in cells]
        elif len(cells) != len(names):
            yield (
                f"line {number}",
                Broken(f"{len(cells)} columns instead of {len(names)} ({', '.join(names)})"),
            )
        else:
            yield f"line {number}", dict(zip(names, cells, strict=True))
