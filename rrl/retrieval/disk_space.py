"""Report a full disk as a clear error, also for writers that hide the reason."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rrl.errors import UserError
from rrl.files import DISK_FULL

MIN_FREE_BYTES = 64 << 10
"""A disk with less free space than this counts as full."""


@contextlib.contextmanager
def detect_disk_full(size: int, folder: Path) -> Iterator[None]:
    """Raise the system's disk-full error for writers whose errors do not name the cause (NumPy, ScaNN).

    If the body fails and `folder` has no space for `size` more bytes, OSError is raised instead of the writer's error.
    """
    try:
        yield
    except (OSError, RuntimeError):
        check_free_space(size, folder)
        raise


def check_free_space(size: int, folder: Path) -> None:
    """Raise OSError if `folder` has no space for `size` more bytes. It allocates the space and releases it again at once."""
    with tempfile.TemporaryFile(dir=folder) as scratch:
        os.posix_fallocate(scratch.fileno(), 0, max(1, size))


@contextlib.contextmanager
def explain_disk_full(folder: Path) -> Iterator[None]:
    """Turn "no space left" into a UserError that names the unfinished folder and how to continue."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise UserError(
            f"index {folder}: the disk is full ({error.strerror}). The unfinished index stays there. Free some space and run "
            "the same command again to continue, or remove that folder."
        ) from error
