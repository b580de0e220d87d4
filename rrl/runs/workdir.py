"""The workdir of a run: it belongs to one config (`refuse_other_config`) and to one process at a time (`lock_workdir`)."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from rrl.config.renamed import rename_stored
from rrl.errors import UserError
from rrl.files import LOCK, MAX_NAME_BYTES, exclusive_lock, saving

CONFIG = "config.json"
"""File with the run's settings, as JSON."""
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
"""Files that a training run creates in its workdir, besides `CONFIG`."""
UNFINISHED_RESULTS: Mapping[str, str] = {
    "checkpoints/*": "checkpoints",
    "results.jsonl": "answers (results.jsonl)",
    "blocks/*.jsonl": "sampled trajectories (blocks)",
}
"""Glob pattern -> description of results that a run of the same config continues. A cold start
samples its questions in blocks, one file each (`rrl.sft.cold_start`)."""
ADDED_FIELDS = (
    "run.data.content",
    "run.tokenizer_sha256",
    "run.encoder_sha256",
    "content",
    "retriever.encoder_sha256",
)
"""Fields of config.json that older versions did not write. A run without them may continue."""
MAX_DIFFERENCES = 6
"""Largest number of differing fields that an error message lists."""

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


def read_config(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the config.json of a workdir. Raises UserError with file and line if it is broken."""
    path = pathlib.Path(workdir) / CONFIG
    fix = "restore the file that the run wrote, or delete the workdir"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {fix}") from error
    try:
        value = json.loads(data.decode())
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8; {fix}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}); {fix}") from error
    except RecursionError as error:
        raise UserError(f"{path}: not valid JSON (nested too deeply); {fix}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}; {fix}")
    return rename_stored(value)


def read_identity(workdir: str | os.PathLike[str], *fields: str) -> dict[str, Any]:
    """Return the identity of a workdir's run: models, data and recipe, from the section `run` of its config.json.

    Raises:
        UserError: config.json is broken, or the section is missing or lacks one of `fields`.
    """
    run = read_config(workdir).get("run")
    missing = [field for field in fields if field not in run] if isinstance(run, dict) else ["run"]
    if not isinstance(run, dict) or missing:
        raise UserError(
            f"{pathlib.Path(workdir) / CONFIG} lacks {', '.join(missing)}; give the workdir of a training run, or delete that "
            "folder"
        )
    return run


def refuse_other_config(
    workdir: str | os.PathLike[str],
    config: Mapping[str, Any],
    may_differ: tuple[str, ...] = (),
    may_grow: tuple[str, ...] = (),
) -> dict[str, tuple[Any, Any]]:
    """Raise UserError if the workdir belongs to a run of another config.

    Args:
        workdir: folder of the run.
        config: settings of the run that is about to start.
        may_differ: dotted names of fields, or of mappings of fields, that may differ.
        may_grow: dotted names of numeric fields that may be larger than before.

    Returns:
        The fields of `may_grow` that are larger, each with its old and its new value.

    Raises:
        UserError: the config differs (the message names the fields), the workdir has results but no config.json, or it cannot
            be created.
    """
    path = pathlib.Path(workdir) / CONFIG
    refuse_unwritable(workdir, "workdir")
    if not path.exists():
        if descriptions := [
            text for pattern, text in UNFINISHED_RESULTS.items() if any(path.parent.glob(pattern))
        ]:
            raise UserError(
                f"workdir {os.fspath(workdir)} holds {descriptions[0]}, but the config.json of their run is missing; restore "
                "that file, choose another --workdir, or delete that folder."
            )
        return {}
    stored = _flat(read_config(workdir))
    given = _flat(json.loads(json.dumps(config)))
    names = sorted(n for n in stored.keys() | given.keys() if not _is_within(n, may_differ))
    # Fields that the version of the stored config did not write; its run may continue.
    unwritten = [prefix for prefix in ADDED_FIELDS if not any(_is_within(n, (prefix,)) for n in stored)]
    grown = {
        n: (stored[n], given[n])
        for n in may_grow
        if n in stored and n in given and _grew(stored[n], given[n])
    }
    names = [n for n in names if n not in grown and not _is_within(n, tuple(unwritten))]
    absent = "(absent)"
    differing = [
        f"{n}: {stored.get(n, absent)!r} there, {given.get(n, absent)!r} now"
        for n in names
        if stored.get(n, absent) != given.get(n, absent)
    ]
    if differing:
        more = f"; and {len(differing) - MAX_DIFFERENCES} more" if len(differing) > MAX_DIFFERENCES else ""
        raise UserError(
            f"workdir {os.fspath(workdir)} holds a run of another config ({'; '.join(differing[:MAX_DIFFERENCES])}{more}). "
            "Use the same settings to continue it, choose another --workdir, or delete that folder."
        )
    return grown


def _is_within(name: str, fields: tuple[str, ...]) -> bool:
    """Return whether a dotted name is one of these fields or lies within one."""
    return any(name == field or name.startswith(f"{field}.") for field in fields)


def _grew(before: Any, now: Any) -> bool:
    return isinstance(before, int | float) and isinstance(now, int | float) and now > before


def refuse_unwritable(folder: str | os.PathLike[str], option: str) -> None:
    """Raise UserError if `folder` is a file, cannot be created or is not writable. `option` is its flag, without the dashes."""
    path = pathlib.Path(folder).absolute()
    for name in path.parts:
        if (size := len(os.fsencode(name))) > MAX_NAME_BYTES:
            raise UserError(
                f"{option} {name[:40]}...: a name of {size} bytes is too long for the file system, which allows "
                f"{MAX_NAME_BYTES}; choose a shorter --{option}."
            )
    if path.is_file():
        raise UserError(f"{option} {os.fspath(folder)} is a file; choose a folder, which may be a new one.")
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        reason = "cannot be written to" if nearest.is_dir() else "is a file"
        raise UserError(f"{option} {os.fspath(folder)}: {nearest} {reason}; choose another --{option}.")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out
