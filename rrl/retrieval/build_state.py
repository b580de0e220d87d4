"""The options of a build, and the state of its unfinished folder, from which a killed build continues."""

import contextlib
import dataclasses
import errno
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rrl.data.records import OnError
from rrl.errors import UserError
from rrl.files import DISK_FULL, LOCK, atomic_stream

SETTINGS_STATE = "wanted.json"
"""The settings with which the build was begun."""
CORPUS_STATE = "corpus.json"
"""Which corpus file was read, and the result."""
TRUNCATED_COUNTS = "cut.txt"
"""A line per embedded block: its number of truncated passages."""
PARTIAL_BLOCK = "begun.npz"
"""The embeddings of an incomplete block."""
STATE_FILES = (SETTINGS_STATE, CORPUS_STATE, TRUNCATED_COUNTS, PARTIAL_BLOCK, LOCK)
"""Files of an unfinished folder that record its progress or lock it. A complete index has none of them."""

Progress = Callable[[str, int, int], None]
"""Progress callback: (stage, passages done, total passages). The total is 0 while it is unknown."""


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """How a corpus is read, and limits of the build."""

    memory_gb: float | None = None
    """Memory for ScaNN, in 10^9 bytes; None: most of the machine's."""
    block: int = 8192
    """Passages that are embedded or counted together. A kill in these two stages loses at most one block of work."""
    on_error: OnError = "refuse"
    """What to do with a broken record of a corpus file: "refuse" raises UserError, "skip" leaves it out."""
    columns: Sequence[str] = ()
    """Columns of a corpus file that is a table without a header, such as ("id", "text", "title") (see `iter_passages`)."""
    shard: tuple[int, int] = (0, 1)
    """(i, n) indexes every n-th passage from the i-th (counted from 0), for a corpus spread over n hosts."""

    def __post_init__(self) -> None:
        index, count = self.shard
        if not 0 <= index < count:
            raise UserError(f"shard={index}/{count} must be one of 0/n to (n-1)/n, such as 0/4")


def make_unfinished_folder(unfinished: Path, out: Path) -> None:
    """Make the folder of a build of `out`, or continue in it if it exists. Raises UserError if it cannot be made."""
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise UserError(f"index folder {out}: cannot be created ({error}). Give another path.") from error


@contextlib.contextmanager
def explain_deleted_folder(unfinished: Path) -> Iterator[None]:
    """Raise a clear UserError if the folder is deleted or renamed while it is written."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOENT or unfinished.is_dir():
            raise
        raise UserError(
            f"index {unfinished}: the folder was deleted or renamed during the build. Put it back, or run the same command "
            "again to start over."
        ) from error


def check_settings(unfinished: Path, settings: dict[str, Any]) -> None:
    """Raise UserError if the unfinished folder was begun with other settings; otherwise save the settings."""
    file = unfinished / SETTINGS_STATE
    if saved := read_state(file):
        different = [name for name in saved.keys() | settings.keys() if saved.get(name) != settings.get(name)]
        if different:
            named = "; ".join(f"{n}: {saved.get(n)} there, {settings.get(n)} now" for n in sorted(different))
            raise UserError(
                f"index {unfinished}: an unfinished build with other settings ({named}). Give the same settings to continue "
                "it, or remove that folder."
            )
    with atomic_stream(file) as stream:
        stream.write(json.dumps(settings).encode())


def read_state(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of an unfinished build, {} if it is missing. Raises UserError if it is damaged."""
    if not file.is_file():
        return {}
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise TypeError(f"{state!r:.40} is not a JSON object")
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"index {file.parent}: damaged, {file.name} cannot be read ({error}). Remove that folder and build again."
        ) from error
    return state
