"""A workdir belongs to one process at a time. Read `lock_workdir` first."""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence

import jax

from rrl.errors import UserError
from rrl.files import LOCK, exclusive_lock, saving

FOLDERS = ("checkpoints", "model_files", "policy", "tensorboard", "not_finite", "report", "indexes")
"""Folders that a training run creates in its workdir."""
FILES = (
    "metrics.jsonl",
    "curves.png",
    "trajectories.jsonl",
    "trajectories.html",
    "summary.txt",
    "result.json",
)
"""Files that a training run creates in its workdir, besides config.json."""

_locked_workdirs: set[pathlib.Path] = set()
"""Workdirs that this process has locked."""
_LOCKED = (
    "workdir {}: another process works there. Wait until it has ended, stop it, or choose another --workdir."
)


@contextlib.contextmanager
def lock_workdir(workdir: str | os.PathLike[str]) -> Iterator[None]:
    """Lock a workdir within the block, so that no other process runs in it. Creates the folder if it is missing.

    Readers (export, evaluation) do not take the lock. The operating system releases it when the process ends, even by a kill.
    The lock is reentrant within a process. In a run of several processes only the first takes the lock.

    Raises:
        UserError: another process has locked the workdir.
    """
    folder = pathlib.Path(workdir).absolute()
    if folder in _locked_workdirs or jax.process_index() != 0:
        yield
        return
    with contextlib.ExitStack() as stack:
        with saving(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with saving(folder / LOCK):
            stack.enter_context(exclusive_lock(folder, _LOCKED.format(os.fspath(workdir))))
        _locked_workdirs.add(folder)
        stack.callback(_locked_workdirs.discard, folder)
        yield


def refuse_occupied(
    workdir: str | os.PathLike[str], folders: Sequence[str] = FOLDERS, files: Sequence[str] = FILES
) -> None:
    """Raise UserError if another process has locked the workdir, or if a path in it that the run needs is of the wrong type.

    The type is wrong if one of `folders` is a file, or one of `files` is a folder. This function writes nothing; call it
    before models are loaded.
    """
    folder = pathlib.Path(workdir).absolute()
    for name in folders:
        if (folder / name).exists() and not (folder / name).is_dir():
            raise UserError(f"{folder / name} is a file, but the run needs a folder there; move it away")
    for name in files:
        if (folder / name).is_dir():
            raise UserError(f"{folder / name} is a folder, but the run needs a file there; move it away")
    if (folder / LOCK).is_file():
        with lock_workdir(workdir):
            pass
