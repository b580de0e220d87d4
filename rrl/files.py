"""Files that are whole or not there, whatever kills us."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replaced(file: Path, beside: str = ".part") -> Iterator[BinaryIO]:
    """A stream to a file that appears under its name only when it is whole; until then it is one `beside` it, of that ending."""
    work = file.with_name(file.name + beside)
    try:
        with work.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        work.replace(file)
    except BaseException:
        work.unlink(missing_ok=True)
        raise


def write_whole(file: Path, text: str) -> None:
    """The same of a text; several may write it at a time, and one of theirs is there."""
    with replaced(file, f".{uuid.uuid4().hex}") as stream:
        stream.write(text.encode())
