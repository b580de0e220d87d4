"""Disks that are full."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rrl.errors import UserError
from rrl.files import DISK_FULL

SPARE = 64 << 10
"""Bytes that a disk has left unless it is full."""


@contextlib.contextmanager
def room_for(size: int, folder: Path) -> Iterator[None]:
    """For writers whose errors do not say why (NumPy's, ScaNN's): the system's own, where `folder` has no room for so many
    more bytes."""
    try:
        yield
    except (OSError, RuntimeError):
        reserve(size, folder)
        raise


def reserve(size: int, folder: Path) -> None:
    """OSError where `folder` has no room for so many more bytes; none are taken."""
    with tempfile.TemporaryFile(dir=folder) as scratch:
        os.posix_fallocate(scratch.fileno(), 0, max(1, size))


@contextlib.contextmanager
def disk_full_error(folder: Path) -> Iterator[None]:
    """Turns "no space left" into a UserError that says what is kept and how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise UserError(
            f"index {folder}: the disk is full ({error.strerror}). What is done is kept there, marked unfinished; make "
            "room and give the same command again, or remove that folder."
        ) from error
