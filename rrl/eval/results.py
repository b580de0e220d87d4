"""Lines that are appended as they come and outlive a kill: the answers of an evaluation, and what judges said of them."""

import json
import numbers
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rrl.errors import UserError
from rrl.files import append_bytes, atomic_stream, read_json_lines, saving

_REMEDY = "remove that line and give the command that wrote the file again"
_WORDS: Mapping[type, str] = {numbers.Real: "a number", str: "a text", dict: "an object"}
_ANY: Mapping[str, type] = types.MappingProxyType({})


class ResultLines:
    """A file of JSON objects with an id each. What a kill left of a line that it cut is dropped when the file is opened."""

    def __init__(self, path: Path, allowed: Iterable[str]) -> None:
        """Reads it, or makes it.

        Raises UserError that names the line for one that is no object with an id, an id that comes twice or is none of `allowed`;
        SaveError where it cannot be written.
        """
        self.path = path
        with saving(path):
            drop_partial_line(path)
            path.touch()
        self.done = _ids(path, set(allowed))

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line. Raises SaveError, also where the file was deleted meanwhile."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with saving(self.path):
            append_bytes(self.path, line)
        self.done.add(record["id"])


def drop_partial_line(path: Path) -> None:
    """Drops what a kill left of a line that it cut from a file, where it is there."""
    if not path.exists():
        return
    whole, newline, cut = path.read_bytes().rpartition(b"\n")
    if cut:
        with atomic_stream(path) as stream:
            stream.write(whole + newline)


def _ids(path: Path, allowed: set[str]) -> set[str]:
    first: dict[str, int] = {}
    remedy = "remove that line, and its question is asked again"
    for number, record in read_json_lines(path, remedy):
        if "id" not in record:
            raise UserError(f"{path}, line {number}: no record with an id; {remedy}")
        identity = record["id"]
        if not isinstance(identity, str) or identity not in allowed:
            raise UserError(
                f"{path}, line {number}: the id {identity!r} is none of the questions asked; remove that line, or give another "
                "--workdir"
            )
        if identity in first:
            raise UserError(
                f"{path}, line {number}: the id {identity!r} is there twice, first on line {first[identity]}; remove one of them"
            )
        first[identity] = number
    return set(first)


def read_lines(path: Path, *fields: str, kinds: Mapping[str, type] = _ANY) -> list[dict[str, Any]]:
    """All whole lines of such a file; none where it is not there.

    Raises UserError that names the line for one that is no JSON object, lacks one of `fields`, or has a value that is not of its
    kind in `kinds` (of `_WORDS`).
    """
    if not path.exists():
        return []
    records = []
    for number, record in read_json_lines(path, _REMEDY):
        if lacking := [field for field in fields if field not in record]:
            raise UserError(f"{path}, line {number}: there is no {lacking[0]!r}; {_REMEDY}")
        for name in record.keys() & kinds.keys():
            if not isinstance(record[name], kinds[name]):
                raise UserError(
                    f"{path}, line {number}: {name}={record[name]!r} must be {_WORDS[kinds[name]]}; {_REMEDY}"
                )
        records.append(record)
    return records
