"""Records of a data file whatever its container: JSON lines, one JSON document or a table; plain, gzip or bzip2.

The content decides: compression by its magic bytes, JSON by its first characters; only `.jsonl`, `.tsv` and `.csv` (before
`.gz` or `.bz2`) are believed by name. A record that cannot be read is yielded as a `BrokenRecord`; the caller refuses or skips
it. Half a character, which an escape of JSON may stand for, is read as "?".
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

from rrl.data.decoding import BrokenRecord, decode, open_plain, plain_name
from rrl.data.tables import QUESTION_IDS, read_table
from rrl.errors import UserError
from rrl.text.characters import replace_lone_surrogates

OnError = Literal["refuse", "skip"]
OnFault = Literal["refuse", "skip", "stop"]
"""What a run does on a fault of its data. Broken records refuse the file ("refuse", "stop") or are skipped. A question that is
too long for the context ends as "context_limit"; with "stop" the run does not begin."""
T = TypeVar("T")

LIST_FIELDS = ("Data", "data", "queries", "questions", "examples")
"""Fields of a JSON document under which publishers put their list of records."""

TABLE_ENDINGS = (".tsv", ".csv")
"""Endings of tables."""

MAX_NAMED_LINES = 5
"""How many broken places a log line names; the rest is counted."""


def on_broken(on_fault: OnFault) -> OnError:
    """What a broken record does."""
    return "skip" if on_fault == "skip" else "refuse"


class ExcludedRecord(ValueError):
    """A record that is read rightly but holds nothing to use, such as a document without title and text."""


def read_records(path: str | Path, columns: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (place, record): place is "line 7" or "record 7" (from 1), record a decoded value or `BrokenRecord`.

    Empty lines are passed over. A JSON object of {title: [sentences]} yields ("record i", (title, sentences)), one of
    {id: {question or answer ...}} those objects with the id in them, and one with a list of objects under a name of `LIST_FIELDS`
    that list. `columns` are the meaning of a table's columns, where its header does not say it (see `read_table`).
    Raises UserError if the file cannot be opened or holds no readable text at all, and as `read_table`.
    """
    path = Path(path)
    ending = Path(plain_name(path)).suffix
    if columns and ending not in TABLE_ENDINGS:
        raise UserError(
            f"columns={','.join(columns)}: {path} is no table (named {' or '.join(TABLE_ENDINGS)})"
        )
    try:
        with open_plain(path) as stream:
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
    """What `parse_records` yields, as a list."""
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
    """Yield the items of every record by `parse(position, record)`, whose ValueError marks the record as broken.

    Broken records are refused (UserError naming file, place, reason and `allowed`) or skipped: then each is
    appended to `skipped` as "place: reason" and their number is logged. A record whose `parse` raises `ExcludedRecord` is never
    refused: it is appended to `excluded`, and their number is logged. A file without an item is refused.
    """
    if on_error not in ("refuse", "skip"):
        raise UserError(f"on_error: got {on_error!r}; allowed are 'refuse' and 'skip'.")
    count = total = 0
    broken, empty = _RecordLog(skipped), _RecordLog(excluded)
    for position, (place, record) in enumerate(read_records(path, columns)):
        total += 1
        try:
            if isinstance(record, BrokenRecord):
                raise ValueError(record.reason)
            items = list(parse(position, record))
        except ExcludedRecord as error:
            empty.add(f"{place}: {error}")
            continue
        except ValueError as error:
            if on_error == "refuse":
                raise UserError(
                    f"{path}, {place}: {error}. Allowed: {allowed}. "
                    "Repair the file, or skip its broken records where that can be asked for: --config.data.on_error=skip of a "
                    "run, --skip_broken of launch/build_index.py, on_error='skip' in Python."
                ) from error
            broken.add(f"{place}: {error}")
            continue
        count += len(items)
        yield from items
    if not count:
        found = "the file is empty"
        if broken.count:
            found = f"all {broken.count} records are broken (first: {broken.first[0]})"
        if empty.count:
            found = f"nothing of its {total} records can be used (first: {[*broken.first, *empty.first][0]})"
        raise UserError(f"{path}: {found}. Allowed: {allowed}.")
    for doing, named in (("skipped %d broken records", broken), ("left out %d records", empty)):
        if named.count:
            more = "; ..." if named.count > len(named.first) else ""
            logging.getLogger(__name__).warning(
                f"%s: {doing} of %d (%s%s)", path, named.count, total, "; ".join(named.first), more
            )


class _RecordLog:
    """Records that are not yielded: how many, the first of them, and all where somebody keeps a list."""

    def __init__(self, all_of_them: list[str] | None) -> None:
        self.count, self.first = 0, list[str]()
        self._all = all_of_them

    def add(self, what: str) -> None:
        """Counts one, "place: reason"."""
        self.count += 1
        if len(self.first) < MAX_NAMED_LINES:
            self.first.append(what)
        if self._all is not None:
            self._all.append(what)


def fields_of(record: Any) -> dict[str, Any]:
    """The record as a mapping; ValueError if it is none."""
    if not isinstance(record, dict):
        raise ValueError(f"got {_short(record)}, not an object with named fields")
    return record


def question_fields_of(record: Any) -> dict[str, Any]:
    """As `fields_of`. Of our own results and trajectories, whose question is a record itself, the fields of that stand beside
    the others, and the answer is the prediction."""
    record = fields_of(record)
    question = record.get("question")
    if isinstance(question, dict) and isinstance(question.get("text"), str):
        own = {name: value for name, value in record.items() if name != "answer"}
        said = {"prediction": record["answer"]} if "answer" in record else {}
        return {**said, **own, **question, "question": question["text"]}
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
    """The named list, which a table or a column of JSON may hold as text; empty where the field is missing or null."""
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
    """The list that a text writes down in JSON or as Python does; None if it does not begin and end as a list.

    ValueError for one that cannot be read, such as an array in NumPy's form, whose strings have no commas between them.
    """
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return None
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        found = ast.literal_eval(text)
        whole = not re.search(r"""["']\s+[A-Za-z]{0,2}["']""", text) or _commas_between(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError):
        found = whole = None
    if not isinstance(found, list) or not whole:
        raise ValueError(f"got {_short(text)}, not a list in JSON or Python")
    return found


def _commas_between(text: str) -> bool:
    """Whether no string of a Python literal follows another directly, which Python would join."""
    kinds = [token.type for token in tokenize.generate_tokens(io.StringIO(text).readline)]
    kinds = [kind for kind in kinds if kind not in (tokenize.NL, tokenize.NEWLINE)]
    return not any(a == b == tokenize.STRING for a, b in itertools.pairwise(kinds))


def id_field(record: dict[str, Any], position: int, names: Sequence[str] = QUESTION_IDS) -> str:
    """The first of the named fields with a value, as a string; without one, the position in the file."""
    value = next((record[name] for name in names if record.get(name) is not None), position)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"id: got {_short(value)}, not a string or an integer")
    return str(value)


def record_places(path: str | Path, identity: str) -> list[str]:
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


def _parse(text: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=_unique_names)
        return _whole(value) if "\\ud" in text.lower() else value
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 or "\n" in text.strip() else ""
        return BrokenRecord(f"not JSON ({error.msg}: {line}column {error.colno})")
    except _DuplicateName as error:
        return BrokenRecord(f"{error.name!r} is there twice in one object{_second_place(text, error.name)}")
    except (ValueError, RecursionError) as error:
        return BrokenRecord(str(error))


def _whole(value: Any) -> Any:
    """The value, whose texts can be written down again: an escape may stand for half a character."""
    if isinstance(value, str):
        return replace_lone_surrogates(value)
    if isinstance(value, list):
        return [_whole(part) for part in value]
    if isinstance(value, dict):
        return {_whole(name): _whole(part) for name, part in value.items()}
    return value


class _DuplicateName(ValueError):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _second_place(text: str, name: str) -> str:
    """Where a name of an object of several lines stands again; nothing where other objects have it too."""
    places = [found.start() for found in re.finditer(re.escape(json.dumps(name)) + r"\s*:", text)]
    line = text.count("\n", 0, places[-1]) + 1 if len(places) == 2 else 1
    return f" (line {line})" if line > 1 else ""


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = collections.Counter(name for name, _ in pairs).most_common(1)
        raise _DuplicateName(twice)
    return found


def _json_lines(stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(stream, 1):
        text = decode(line)
        if isinstance(text, BrokenRecord):
            yield f"line {number}", text
        elif text.strip():
            yield f"line {number}", _parse(text.rstrip())


def _json_any(path: Path, stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    """One JSON list, one JSON object of {title: sentences}, or JSON lines."""
    first = stream.readline()
    while first and not first.strip():
        first = stream.readline()
    head = decode(first)
    alone = _parse(head) if isinstance(head, str) and head.lstrip().startswith("{") else None
    more = stream.readline() if isinstance(alone, dict) else b""
    stream.seek(0)
    if isinstance(alone, dict) and (more.strip() or _entries(alone) is None):
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
        entries = _entries(document)
    for number, entry in enumerate([document] if entries is None else entries, 1):
        yield f"record {number}", entry


def _entries(document: dict[str, Any]) -> list[Any] | None:
    """The records of a JSON object that holds many; None where it is a record itself."""
    for name in LIST_FIELDS:
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
    """The questions of an article in SQuAD's own file, each with its title and context; any other record as it is."""
    paragraphs = article.get("paragraphs")
    if not isinstance(paragraphs, list):
        return [article]
    parts = [part for part in paragraphs if isinstance(part, dict) and isinstance(part.get("qas"), list)]
    if not parts or len(parts) < len(paragraphs):
        return [article]
    around = {"title": article.get("title")}
    return [
        around | {"context": part.get("context")} | question
        for part in parts
        for question in part["qas"]
        if isinstance(question, dict)
    ]
