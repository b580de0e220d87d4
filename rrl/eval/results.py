"""Append-only JSON-lines files that survive a kill: the answers of an evaluation, and the verdicts of judges."""

import json
import numbers
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rrl.errors import UserError
from rrl.files import append_bytes, atomic_stream, read_json_lines, saving

_REMEDY = "remove that line and run the command that wrote the file again"
_TYPE_NAMES: Mapping[type, str] = {numbers.Real: "a number", str: "a text", dict: "an object"}
_NO_KINDS: Mapping[str, type] = types.MappingProxyType({})


class ResultLines:
    """A file of JSON objects with an id each. Opening it drops an incomplete last line, which a kill may leave."""

    def __init__(self, path: Path, allowed: Iterable[str]) -> None:
        """Read the ids in the file, or create it.

        Raises UserError, with the line, for one that is not an object with an id, and for an id that is repeated or not in
        `allowed`. Raises SaveError if the file cannot be written.
        """
        self.path = path
        with saving(path):
            drop_partial_line(path)
            path.touch()
        self.done = _ids(path, set(allowed))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line. Raises SaveError, also if the file was deleted meanwhile."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with saving(self.path):
            append_bytes(self.path, line)
        self.done.add(record["id"])


def drop_partial_line(path: Path) -> None:
    """Drop an incomplete last line from a file, if the file exists."""
    if not path.exists():
        return
    whole, newline, cut = path.read_bytes().rpartition(b"\n")
    if cut:
        with atomic_stream(path) as stream:
            stream.write(whole + newline)


def _ids(path: Path, allowed: set[str]) -> set[str]:
    first: dict[str, int] = {}
    remedy = "remove that line, and its question is answered again"
    for number, record in read_json_lines(path, remedy):
        if "id" not in record:
            raise UserError(f"{path}, line {number}: the record has no id; {remedy}")
        identity = record["id"]
        if not isinstance(identity, str) or identity not in allowed:
            raise UserError(
                f"{path}, line {number}: the id {identity!r} belongs to no question of this evaluation; remove that line, or "
                "give another --workdir"
            )
        if identity in first:
            raise UserError(
                f"{path}, line {number}: the id {identity!r} occurs twice, first on line {first[identity]}; remove one of them"
            )
        first[identity] = number
    return set(first)


def read_lines(path: Path, *fields: str, kinds: Mapping[str, type] = _NO_KINDS) -> list[dict[str, Any]]:
    """Return the records of a JSON-lines file; [] if it does not exist.

    Raises UserError, with the line, for one that is not a JSON object, lacks one of `fields`, or has a value of another type than
    in `kinds` (one of the types in `_TYPE_NAMES`).
    """
    if not path.exists():
        return []
    records = []
    for number, record in read_json_lines(path, _REMEDY):
        if missing := [field for field in fields if field not in record]:
            raise UserError(f"{path}, line {number}: there is no {missing[0]!r}; {_REMEDY}")
        for name in record.keys() & kinds.keys():
            if not isinstance(record[name], kinds[name]):
                raise UserError(
                    f"{path}, line {number}: {name}={record[name]!r} must be {_TYPE_NAMES[kinds[name]]}; {_REMEDY}"
                )
        records.append(record)
    return records
