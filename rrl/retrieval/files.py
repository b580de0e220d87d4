"""One writer at a time in a folder, and disks that are full."""

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rrl.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says when a disk, a quota or a file's limit is full."""

SPARE = 64 << 10
"""Bytes that a disk has left unless it is full."""


LOCK = "lock"


@contextlib.contextmanager
def locked(folder: Path, refusal: str) -> Iterator[int]:
    """Keeps other processes, whose writing would mix with ours, out of a folder; UserError(`refusal`) where one is in it.

    The system lets go of it with the process, however that ends, and with those that were given the descriptor that is yielded. A
    file system without locks has none.
    """
    with (folder / LOCK).open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(refusal) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        yield stream.fileno()


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
