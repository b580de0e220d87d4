"""Writing that survives a kill and a full disk."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rrl.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says when a disk, a quota or a file's limit is full."""


@contextlib.contextmanager
def replaced(file: Path) -> Iterator[BinaryIO]:
    """A stream to a file that appears under its name only when it is whole."""
    work = file.with_name(file.name + ".part")
    with work.open("wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
    work.replace(file)


@contextlib.contextmanager
def disk_full_told(folder: Path) -> Iterator[None]:
    """Turns "no space left" into a UserError that says what is kept and how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise UserError(
            f"index {folder}: the disk is full ({error.strerror}). What is done is kept there, marked unfinished; make "
            "room and give the same command again, or remove that folder."
        ) from error
