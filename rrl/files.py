"""Files that are whole or not there, files that grow by a line at a time, one writer at a time in a folder, one clear error
for a save that fails, and the models and configs that come with rrl, from any current folder."""

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
"""Error numbers of a full disk, a full quota, and a file that has reached its limit."""
MAX_NAME_BYTES = 255
"""Bytes of the longest name of a file or folder."""
LOCK = "lock"
"""Name of the file that `exclusive_lock` holds."""
CHECKOUT = Path(__file__).resolve().parents[1]
"""Folder that holds this package and `SHIPPED`."""
SHIPPED = ("assets", "configs", "launch")
"""Folders of the checkout whose files are found from every current folder."""
_SAID: set[str] = set()
"""Current folders of which the log says that the files of the checkout are taken."""


def shipped(path: str | os.PathLike[str]) -> Path:
    """The path itself; where it is `assets/...` or alike and not there, that of the checkout, if it has it. The first is logged.

    So configs, launchers and notebooks name what comes with rrl alike from every current folder.
    """
    path = Path(path)
    if not _is_shipped(path) or path.exists() or not (CHECKOUT / path).exists():
        return path
    if str(Path.cwd()) not in _SAID:
        _SAID.add(str(Path.cwd()))
        log.warning("%s is not in %s: what comes with rrl is taken from %s", path, Path.cwd(), CHECKOUT)
    return CHECKOUT / path


def looked_in(path: str | os.PathLike[str]) -> str:
    """Where `shipped` looks for a path, in words, for an error about one that is not there."""
    path = Path(path)
    if not _is_shipped(path):
        return "there"
    return "in " + " or ".join(dict.fromkeys((str(path.absolute()), str(CHECKOUT / path))))


def _is_shipped(path: Path) -> bool:
    return path.parts[:1] != () and path.parts[0] in SHIPPED


class SaveError(UserError):
    """A file or folder of a run could not be written. What was saved before is still there."""


@contextlib.contextmanager
def saving(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns a failed write within the block into a SaveError that names `path`, the reason and what to do."""
    try:
        yield
    except Exception as error:
        if not _is_file_system_error(error):
            raise
        raise save_error(Path(path), error) from error


def save_error(path: Path, error: BaseException) -> SaveError:
    """What to raise when `path` could not be saved because of `error`."""
    path = path.absolute()
    missing = next((parent for parent in reversed(path.parents) if not parent.is_dir()), None)
    text = " ".join(str(error).split())
    if missing is not None and missing.exists():
        reason, cure = f"{missing} is a file", "Put the folder back"
    elif missing is not None:
        reason, cure = f"the folder {missing} is gone", "Put it back"
    elif isinstance(error, FileExistsError | NotADirectoryError):
        reason, cure = "a file is in its place", "Move that file away"
    elif isinstance(error, IsADirectoryError):
        reason, cure = "a folder is in its place", "Move that folder away"
    elif getattr(error, "errno", None) in DISK_FULL or re.search(
        "RESOURCE_EXHAUSTED|No space left|quota", text
    ):
        reason, cure = "the disk, its inodes or the quota are full", "Free space"
    elif isinstance(error, FileNotFoundError):
        reason, cure = "it is gone", "Put it back"
    else:
        reason, cure = text[:300], "Make it writable"
    return SaveError(
        f"{path} could not be saved: {reason}. {cure}, then give the same command again: it continues from what was saved "
        "before."
    )


def _is_file_system_error(error: Exception) -> bool:
    """Whether an error comes from the file system: Hugging Face's Rust code raises a bare Exception for those, TensorStore
    (in Orbax) a ValueError that begins with a status code."""
    return (
        isinstance(error, OSError)
        or type(error) is Exception
        or (isinstance(error, ValueError) and re.match("[A-Z_]{5,}: ", str(error)) is not None)
    )


@contextlib.contextmanager
def atomic_stream(file: Path, beside: str = ".part") -> Iterator[BinaryIO]:
    """A stream to a file that appears under its name only when it is whole; until then it is one `beside` it, of that ending.

    Raises OSError that names the file.
    """
    work = file.with_name(file.name + beside)
    try:
        with work.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        work.replace(file)
    except BaseException as error:
        _add_file_name(file, error)
        # Where the folder is gone, this fails too: the first error says why.
        with contextlib.suppress(OSError):
            work.unlink(missing_ok=True)
        raise


def write_atomically(file: Path, text: str) -> None:
    """The same of a text; several may write it at a time, and one of theirs is there. A file that says it already is left."""
    content = text.encode()
    if file.is_file() and file.read_bytes() == content:
        return
    with atomic_stream(file, f".{uuid.uuid4().hex}") as stream:
        stream.write(content)


def append_bytes(file: Path, data: bytes) -> None:
    """Appends to a file that must be there. A write that fails leaves the file as it was.

    The file is opened for each call, so that one that was deleted or replaced meanwhile is noticed.
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
    """Adds the file to an error that has none, as that of a write to a stream."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = os.fspath(file)


@contextlib.contextmanager
def wait_for_lock(folder: Path) -> Iterator[None]:
    """Waits until no other process is within such a block of the same folder. A file system without locks lets all in."""
    with (folder / LOCK).open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            _refuse_unless_lockless(error)
        yield


def _refuse_unless_lockless(error: OSError) -> None:
    """Raises the error again unless it says that the file system has no locks."""
    if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
        raise error


@contextlib.contextmanager
def exclusive_lock(folder: Path, refusal: str) -> Iterator[int]:
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
            _refuse_unless_lockless(error)
        yield stream.fileno()


def read_json_lines(file: Path, remedy: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number, from 1, and the object of each line of a file of JSON lines; blank lines are passed over.

    A last line without its newline that is not a whole object was cut short by a kill, and is ignored.

    Raises UserError for a file that cannot be read, and for any other line that is not a JSON object in UTF-8: it names file
    and line, and ends with `remedy`.
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
                raise TypeError(f"{line[:40].decode('utf-8', 'replace')} is no JSON object")
        except (ValueError, TypeError, RecursionError) as error:
            if number == len(lines):
                return
            raise UserError(f"{file}, line {number}: {error}; {remedy}") from error
        yield number, record
