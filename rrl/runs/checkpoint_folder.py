"""The folder of a workdir's checkpoints: which ones are complete, and what killed saves left there.

Read `complete_steps` first.
"""

import errno
import json
import logging
import os
import pathlib
import shutil
from typing import Any

import jax

from rrl.errors import UserError

FOLDER = "checkpoints"
"""Folder of a workdir with one folder per saved step."""
_log = logging.getLogger(__name__)

_TEMPORARY = "*.orbax-checkpoint-tmp*"
"""Pattern of the names that Orbax gives checkpoints until they are complete."""
_COMMITTED = "commit_success.txt"
"""File that marks a committed checkpoint. Orbax writes it last, before it gives the folder of the step its final name."""
_STEP_METADATA = "_CHECKPOINT_METADATA"
"""JSON file in a step's folder. Orbax 0.12 and later also write the time of the commit into it."""
_ITEM_FILES = ("state/_METADATA", "metadata/metadata")
"""One file of each part (arrays, metadata) of a checkpoint. A checkpoint that lacks one of them cannot be read."""
_MAX_FILES = 64
"""Generous upper bound on the files and folders of one checkpoint."""


def complete_steps(folder: pathlib.Path) -> tuple[list[int], dict[int, str]]:
    """Return the sorted steps of complete checkpoints, and for each incomplete step the file that it lacks.

    Orbax itself treats any folder with a number as a checkpoint.

    Raises:
        UserError: there are checkpoints, but none is complete.
    """
    missing_files = {
        int(path.name): _missing_file(path)
        for path in folder.iterdir()
        if path.name.isdigit() and path.is_dir()
    }
    complete = sorted(step for step, file in missing_files.items() if not file)
    incomplete = {step: file for step, file in sorted(missing_files.items()) if file}
    if incomplete and not complete:
        reasons = ", ".join(f"{step} lacks {file}" for step, file in incomplete.items())
        raise UserError(
            f"{folder} holds no complete checkpoint ({reasons}). Restore complete ones from a copy, or delete that folder and "
            "start from the beginning"
        )
    return complete, incomplete


def _missing_file(folder: pathlib.Path) -> str:
    """Return the first file that a step's folder lacks to be a complete checkpoint; "" if it lacks none."""
    if not (folder / _COMMITTED).is_file():
        try:  # either mark proves the commit: the file, or the time in the metadata
            step_metadata = json.loads((folder / _STEP_METADATA).read_bytes())
            committed = step_metadata["commit_timestamp_nsecs"]
        except (OSError, ValueError, LookupError, TypeError):
            committed = None
        if not committed:
            return _COMMITTED
    return next((file for file in _ITEM_FILES if not (folder / file).is_file()), "")


def remove_leftovers(folder: pathlib.Path) -> None:
    """Remove the remains of killed saves and killed deletions.

    An incomplete checkpoint that is newer than all complete ones is only renamed, since it may come from an interrupted
    copy of the workdir, which the user can still complete.
    """
    for path in folder.glob(_TEMPORARY):
        if path.is_dir() and not path.is_symlink():
            _log.info("removing %s, left by a killed save", path)
            shutil.rmtree(path)
    complete, incomplete = complete_steps(folder)  # raises if all checkpoints are incomplete
    for step, file in incomplete.items():
        path = folder / str(step)
        if step < complete[-1]:
            _log.warning("removing %s, an incomplete checkpoint (it lacks %s)", path, file)
            shutil.rmtree(path)
            continue
        new_path = path.with_name(f"{step}.incomplete")
        _log.warning(
            "%s is an incomplete checkpoint (it lacks %s): renamed to %s; the one of step %d is used",
            *(path, file, new_path.name, complete[-1]),
        )
        shutil.rmtree(new_path, ignore_errors=True)
        path.rename(new_path)


def require_free_space(folder: pathlib.Path, state: Any) -> None:
    """Raise OSError if `folder` is missing or its disk has no room for the state.

    Without this check TensorStore's threads would print a traceback for each array.
    """
    with os.scandir(folder):
        disk = os.statvfs(folder)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if hasattr(leaf, "nbytes"))
    # Some file systems report 0 for blocks or inodes, which means unknown.
    full = disk.f_blocks and disk.f_bavail * disk.f_frsize < size
    if full or (disk.f_files and disk.f_favail < _MAX_FILES):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
