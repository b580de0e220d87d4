"""Lines that are appended as they come and outlive a kill: the answers of an evaluation, and what judges said of them."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rrl.errors import UserError
from rrl.files import json_lines, replaced

_REMEDY = "remove that line and give the command that wrote the file again"


class Lines:
    """A file of JSON objects with an id each. What a kill left of a line that it cut is dropped when the file is opened."""

    def __init__(self, path: Path, allowed: Iterable[str]) -> None:
        """Opens or makes it.

        Raises UserError that names the line for one that is no object with an id, an id that comes twice or is none of `allowed`.
        """
        self.path = path
        self.done = _ids(path, set(allowed))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line, in a single call to the system, so that it is there whole or, after a kill, not at all."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        written = os.write(self._file, line)
        if written < len(line):
            raise OSError(f"{self.path}: the disk took {written} of {len(line)} bytes; make room and go on")
        self.done.add(record["id"])

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def whole_lines(path: Path) -> bytes:
    """The whole lines of a file, from which what a kill left of a line that it cut is dropped; nothing where it is not there."""
    if not path.exists():
        return b""
    whole, newline, cut = path.read_bytes().rpartition(b"\n")
    if cut:
        with replaced(path) as stream:
            stream.write(whole + newline)
    return whole


def _ids(path: Path, allowed: set[str]) -> set[str]:
    whole = whole_lines(path)
    first: dict[str, int] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            identity = json.loads(line)["id"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, line {number}: no record with an id ({error!r}); remove that line, and its question is asked again"
            ) from error
        if identity in first:
            raise UserError(
                f"{path}, line {number}: the id {identity!r} is there twice, first on line {first[identity]}; remove one of them"
            )
        if identity not in allowed:
            raise UserError(
                f"{path}, line {number}: the id {identity!r} is none of the questions asked; remove that line, or give another "
                "--workdir"
            )
        first[identity] = number
    return set(first)


def read_lines(path: Path, *fields: str) -> list[dict[str, Any]]:
    """All whole lines of such a file; none where it is not there.

    Raises UserError that names the line for one that is no JSON object, or lacks one of `fields`.
    """
    if not path.exists():
        return []
    records = []
    for number, record in json_lines(path, _REMEDY):
        if lacking := [field for field in fields if field not in record]:
            raise UserError(f"{path}, line {number}: there is no {lacking[0]!r}; {_REMEDY}")
        records.append(record)
    return records
