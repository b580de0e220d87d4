"""Read the records of a data file: JSON lines, one JSON document or a table; plain, gzip or bzip2. Read `parse_records` first.

The format is detected by content: compression by its magic bytes, JSON by its first characters. Files named `.jsonl`, `.tsv` or
`.csv` (before `.gz` or `.bz2`) are the exception: they are read as their name says. A record that cannot be read is yielded as
a `BrokenRecord`, for which the caller raises an error, or which it skips. A lone surrogate in a JSON escape is read as "?".
"""

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from rrl.data.decoding import BrokenRecord, decompressed_name, open_decompressed
from rrl.data.fields import fields_of, id_field
from rrl.data.json_records import json_any, json_lines
from rrl.data.tables import read_table
from rrl.errors import UserError

OnError = Literal["refuse", "skip"]
"""How a file is read if a record is broken: "refuse" raises UserError for the file, "skip" skips the record."""
RunOnError = Literal["refuse", "skip", "stop"]
"""The field `on_error` of a run: how it treats broken records, and questions whose prompt is too long for the context.

- Broken record: "refuse" and "stop" raise UserError for the file, "skip" skips the record.
- Prompt too long: "stop" raises UserError before the run starts. With "refuse" and "skip" the episode ends as "context_limit"."""
T = TypeVar("T")

TABLE_ENDINGS = (".tsv", ".csv")
"""Endings of tables."""

MAX_NAMED_LINES = 5
"""Number of broken records that a log line names; the others are only counted."""


def on_error_for(run_on_error: RunOnError) -> OnError:
    """Return how a run with this `on_error` reads its files."""
    return "skip" if run_on_error == "skip" else "refuse"


class ExcludedRecord(ValueError):
    """A valid record that cannot be used, such as a document without title and text, or an unanswerable question."""


def read_records(path: str | Path, columns: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (place, record) for each record of a file.

    The place is "line 7" or "record 7", counted from 1. The record is a decoded value or a `BrokenRecord`. Empty lines are
    skipped. A single JSON object may hold many records:
    - {title: [sentences], ...} yields (title, sentences) pairs;
    - {id: {question or answer ...}, ...} yields the inner objects with their id;
    - an object with a list of objects in one of `rrl.data.json_records.RECORD_LIST_FIELDS` yields that list.

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
                yield from json_lines(stream)
            else:
                yield from json_any(path, stream)
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
    yielded = total = 0
    broken_log, excluded_log = _RecordLog(skipped), _RecordLog(excluded)
    for position, (place, record) in enumerate(read_records(path, columns)):
        total += 1
        try:
            if isinstance(record, BrokenRecord):
                raise ValueError(record.reason)
            items = list(parse(position, record))
        except ExcludedRecord as error:
            excluded_log.add(f"{place}: {error}")
            continue
        except ValueError as error:
            if on_error == "refuse":
                raise UserError(f"{path}, {place}: {error}. Allowed: {allowed}. {_REPAIR}") from error
            broken_log.add(f"{place}: {error}")
            continue
        yielded += len(items)
        yield from items
    if not yielded:
        raise UserError(f"{path}: {_why_empty(total, broken_log, excluded_log)}. Allowed: {allowed}.")
    for event, records in (("skipped %d broken records", broken_log), ("excluded %d records", excluded_log)):
        if records.count:
            more = "; ..." if records.count > len(records.first) else ""
            logging.getLogger(__name__).warning(
                f"%s: {event} of %d (%s%s)", path, records.count, total, "; ".join(records.first), more
            )


_REPAIR = (
    "Repair the file, or skip its broken records: --config.data.on_error=skip for a run, --skip_broken for "
    "launch/build_index.py, on_error='skip' in Python."
)
"""What an error for a broken record advises."""


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


def _why_empty(total: int, broken: _RecordLog, excluded: _RecordLog) -> str:
    """Return why none of the `total` records of a file was yielded."""
    if excluded.count:
        return f"none of its {total} records can be used (first: {[*broken.first, *excluded.first][0]})"
    if broken.count:
        return f"all {broken.count} records are broken (first: {broken.first[0]})"
    return "the file is empty: it has no records"


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
