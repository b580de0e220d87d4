"""Append-only JSON-lines files that survive a kill: the answers of an evaluation, and the verdicts of judges."""

import json
import numbers
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rrl.errors import UserError
from rrl.files import append_bytes, atomic_stream, read_json_lines, saving

_REMEDY = "remove that line and run the command that wrote the file again"
_TYPE_NAMES: Mapping[type, str] = {numbers.Real: "a number", str: "a text", dict: "an object"}
_NO_TYPES: Mapping[str, type] = MappingProxyType({})


class ResultLines:
    """A file of JSON objects with an id each. Opening it drops an incomplete last line, which a kill may leave."""

    def __init__(self, path: Path, allowed: Iterable[str]) -> None:
        """Read the ids in the file, or create it.

        Raises UserError, which names the line, if a line is not an object with an id, or if its id is repeated or not in
        `allowed`. Raises SaveError if the file cannot be written.
        """
        self.path = path
        with saving(path):
            drop_partial_line(path)
            path.touch()
        self.ids = _ids(path, set(allowed))
        """Ids of the records in the file."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line. Raises SaveError, also if the file was deleted meanwhile."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with saving(self.path):
            append_bytes(self.path, line)
        self.ids.add(record["id"])


def drop_partial_line(path: Path) -> None:
    """Drop an incomplete last line from a file, if the file exists."""
    if not path.exists():
        return
    complete, newline, partial = path.read_bytes().rpartition(b"\n")
    if partial:
        with atomic_stream(path) as stream:
            stream.write(complete + newline)


def _ids(path: Path, allowed: set[str]) -> set[str]:
    """Return the ids in a file. Raises UserError, which names the line, for an id that is missing, repeated or not `allowed`."""
    first: dict[str, int] = {}
    remedy = "remove that line, and its question is answered or judged again"
    for number, record in read_json_lines(path, remedy):
        if "id" not in record:
            raise UserError(f"{path}, line {number}: the record has no id; {remedy}")
        record_id = record["id"]
        if not isinstance(record_id, str) or record_id not in allowed:
            raise UserError(
                f"{path}, line {number}: the id {record_id!r} belongs to no question of this evaluation; remove that line, or "
                "give another --workdir"
            )
        if record_id in first:
            raise UserError(
                f"{path}, line {number}: the id {record_id!r} occurs twice, first on line {first[record_id]}; remove one of them"
            )
        first[record_id] = number
    return set(first)


def read_lines(path: Path, *fields: str, types: Mapping[str, type] = _NO_TYPES) -> list[dict[str, Any]]:
    """Return the records of a JSON-lines file; [] if it does not exist.

    Raises UserError, which names the line, if a line is not a JSON object, lacks one of `fields`, or has a value of another type
    than in `types`, which maps fields to types in `_TYPE_NAMES`.
    """
    if not path.exists():
        return []
    records = []
    for number, record in read_json_lines(path, _REMEDY):
        if missing := [field for field in fields if field not in record]:
            raise UserError(f"{path}, line {number}: there is no {missing[0]!r}; {_REMEDY}")
        for name in record.keys() & types.keys():
            if not isinstance(record[name], types[name]):
                raise UserError(
                    f"{path}, line {number}: {name}={record[name]!r} must be {_TYPE_NAMES[types[name]]}; {_REMEDY}"
                )
        records.append(record)
    return records
