"""Safe file writing: atomic replacement, appending, locks on folders, and one clear error for a failed save; and paths of the
files that come with rrl.

Read `atomic_stream` and `exclusive_lock` first.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rrl.errors import UserError

log = logging.getLogger(__name__)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, a full quota, and a file that has reached its size limit."""
MAX_NAME_BYTES = 255
"""Longest name of a file or folder, in bytes."""
LOCK = "lock"
"""Name of the file on which a folder's lock is taken."""
CHECKOUT = Path(__file__).resolve().parents[1]
"""Root of the source tree: the folder that contains this package and the folders of `SHIPPED`."""
SHIPPED = ("assets", "configs", "launch")
"""Folders of the source tree whose files `shipped` finds from every current folder."""
_logged_folders: set[str] = set()
"""Current folders for which `shipped` has already logged its warning."""


def shipped(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file that comes with rrl, wherever the program was started.

    A path such as configs/x.py that is in one of `SHIPPED` but missing in the current folder becomes its path in `CHECKOUT`. Any
    other path is returned as it is. The first replacement in a current folder is logged.
    """
    path = Path(path)
    if not _is_shipped(path) or path.exists() or not (CHECKOUT / path).exists():
        return path
    if str(Path.cwd()) not in _logged_folders:
        _logged_folders.add(str(Path.cwd()))
        log.warning("%s is not in %s; files that come with rrl are read from %s", path, Path.cwd(), CHECKOUT)
    return CHECKOUT / path


def looked_in(path: str | os.PathLike[str]) -> str:
    """Return the end of an error message about a missing path: where `shipped` looked for it.

    This is "in A or B" for a path in one of the folders `SHIPPED`, which has two possible places; "there" for any other path.
    """
    path = Path(path)
    if not _is_shipped(path):
        return "there"
    return "in " + " or ".join(dict.fromkeys((str(path.absolute()), str(CHECKOUT / path))))


def _is_shipped(path: Path) -> bool:
    return path.parts[:1] != () and path.parts[0] in SHIPPED


class SaveError(UserError):
    """A file or folder of a run could not be written. Earlier saves are intact."""


@contextlib.contextmanager
def saving(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn a failed write within the block into a SaveError that names `path`, the reason and the fix."""
    try:
        yield
    except Exception as error:
        if not _is_file_system_error(error):
            raise
        raise save_error(Path(path), error) from error


def save_error(path: Path, error: BaseException) -> SaveError:
    """Return the SaveError for `path`, with a reason and a fix that follow from `error`."""
    path = path.absolute()
    broken_parent = next((parent for parent in reversed(path.parents) if not parent.is_dir()), None)
    text = " ".join(str(error).split())
    if broken_parent is not None and broken_parent.exists():
        reason, fix = f"{broken_parent} is a file", "Put the folder back"
    elif broken_parent is not None:
        reason, fix = f"the folder {broken_parent} is gone", "Put it back"
    elif isinstance(error, FileExistsError | NotADirectoryError):
        reason, fix = "a file is in its place", "Move that file away"
    elif isinstance(error, IsADirectoryError):
        reason, fix = "a folder is in its place", "Move that folder away"
    elif getattr(error, "errno", None) in DISK_FULL or re.search(
        "RESOURCE_EXHAUSTED|No space left|quota", text
    ):
        reason, fix = "the disk, its inodes or the quota are full", "Free space"
    elif isinstance(error, FileNotFoundError):
        reason, fix = "it is gone", "Put it back"
    else:
        reason, fix = text[:300], "Make it writable"
    return SaveError(
        f"{path} could not be saved: {reason}. {fix}, then give the same command again: it continues from what was saved "
        "before."
    )


def _is_file_system_error(error: Exception) -> bool:
    """Return whether the file system caused an error.

    Hugging Face's Rust code raises a bare Exception for such errors. TensorStore (in Orbax) raises a ValueError that begins
    with a status code.
    """
    return (
        isinstance(error, OSError)
        or type(error) is Exception  # the bare class, no subclass
        or (isinstance(error, ValueError) and re.match("[A-Z_]{5,}: ", str(error)) is not None)
    )


@contextlib.contextmanager
def atomic_stream(file: Path, suffix: str = ".part") -> Iterator[BinaryIO]:
    """Yield a binary stream to a temporary file, which replaces `file` when the block ends without an error.

    The temporary file is `file` + `suffix`. An error removes it and leaves an existing `file` unchanged.

    Raises:
        OSError: the write failed; the error names the file.
    """
    temporary = file.with_name(file.name + suffix)
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    except BaseException as error:
        _add_file_name(file, error)
        # If the folder is gone, this fails too; the first error gives the reason.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_atomically(file: Path, text: str) -> None:
    """Write a text file atomically. If several processes write it at once, the last to finish wins.

    A file that already has this content is not touched.
    """
    content = text.encode()
    if file.is_file() and file.read_bytes() == content:
        return
    with atomic_stream(file, f".{uuid.uuid4().hex}") as stream:
        stream.write(content)


def append_bytes(file: Path, data: bytes) -> None:
    """Append to an existing file. A failed write leaves the file as it was.

    Each call opens the file, so that a file that was deleted or replaced in the meantime raises an error.
    """
    with file.open("r+b", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[stream.write(rest) :]
        except OSError as error:
            _add_file_name(file, error)
            stream.truncate(size)
            raise


def _add_file_name(file: Path, error: BaseException) -> None:
    """Add the file's name to an OSError that has none, such as that of a write to a stream."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = os.fspath(file)


@contextlib.contextmanager
def wait_for_lock(folder: Path) -> Iterator[None]:
    """Wait until no other process holds the folder's lock, then hold it within the block.

    It is the same lock as that of `exclusive_lock`, which fails instead of waiting. On a file system without locks nothing is
    locked.
    """
    with (folder / LOCK).open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            _raise_unless_locks_unsupported(error)
        yield


def _raise_unless_locks_unsupported(error: OSError) -> None:
    """Raise the error again unless its reason is that the file system has no locks."""
    if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
        raise error


@contextlib.contextmanager
def exclusive_lock(folder: Path, refusal: str) -> Iterator[int]:
    """Hold the folder's lock within the block and yield its file descriptor. Fail at once if another process holds the lock.

    The operating system releases the lock when this process and all processes that inherited the descriptor have ended, even by
    a kill. On a file system without locks nothing is locked.

    Raises:
        UserError: another process holds the lock; `refusal` is the message.
    """
    with (folder / LOCK).open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(refusal) from error
        except OSError as error:
            _raise_unless_locks_unsupported(error)
        yield stream.fileno()


def read_json_lines(file: Path, remedy: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each line of a JSON-lines file. Blank lines are skipped.

    An incomplete last line without a newline is skipped: a killed process left it.

    Args:
        file: path of the file.
        remedy: what the user can do about a broken file; it ends the error message.

    Raises:
        UserError: the file cannot be read, or a line is not a JSON object in UTF-8. The message names file and line.
    """
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); {remedy}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
            if not isinstance(record, dict):
                raise TypeError(f"{line[:40].decode('utf-8', 'replace')} is not a JSON object")
        except (ValueError, TypeError, RecursionError) as error:
            if number == len(lines):
                return
            raise UserError(f"{file}, line {number}: {error}; {remedy}") from error
        yield number, record
