"""The folder of a run: it belongs to one config and to one process at a time."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from rrl.config.renamed import rename_stored
from rrl.errors import UserError
from rrl.files import MAX_NAME_BYTES, exclusive_lock, saving

CONFIG = "config.json"
"""What a workdir's run is, as JSON."""
FOLDERS = ("checkpoints", "model_files", "policy", "tensorboard", "not_finite", "report", "indexes")
"""Folders that a training run makes in its workdir."""
FILES = (
    "metrics.jsonl",
    "curves.png",
    "trajectories.jsonl",
    "trajectories.html",
    "summary.txt",
    "result.json",
)
"""Files that it makes, beside `CONFIG`."""
RESUMABLE: Mapping[str, str] = {
    "checkpoints/*": "checkpoints",
    "results.jsonl": "answers (results.jsonl)",
    "blocks/*.jsonl": "sampled trajectories (blocks)",
}
"""What only a run of the same config may go on with."""
ADDED_FIELDS = (
    "run.data.content",
    "run.tokenizer_sha256",
    "run.encoder_sha256",
    "content",
    "retriever.encoder_sha256",
)
"""Fields of configs that older runs did not write."""
MAX_DIFFERENCES = 6
"""Differences that one message names."""

_locked_workdirs: set[pathlib.Path] = set()
"""Workdirs that this process holds."""
_LOCKED = (
    "workdir {}: another process works there. Wait until it has ended, stop it, or choose another --workdir."
)


@contextlib.contextmanager
def lock_workdir(workdir: str | os.PathLike[str]) -> Iterator[None]:
    """Keeps other processes from running in a workdir within the block; makes the folder where it is missing.

    Readers (export, evaluation) take no part. The system releases the lock with the process, however that ends. Blocks of
    one process nest. Of several processes of one run the first holds the workdir.

    Raises:
        UserError: another process holds it.
    """
    folder = pathlib.Path(workdir).absolute()
    if folder in _locked_workdirs or jax.process_index() != 0:
        yield
        return
    with contextlib.ExitStack() as stack:
        with saving(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with saving(folder / "lock"):
            stack.enter_context(exclusive_lock(folder, _LOCKED.format(os.fspath(workdir))))
        _locked_workdirs.add(folder)
        stack.callback(_locked_workdirs.discard, folder)
        yield


def refuse_locked(
    workdir: str | os.PathLike[str], folders: Sequence[str] = FOLDERS, files: Sequence[str] = FILES
) -> None:
    """Raises UserError when another process holds the workdir, or a file stands where the run makes one of its `folders`, or a
    folder where it makes one of its `files`. Writes nothing: to be called before models are loaded."""
    folder = pathlib.Path(workdir).absolute()
    for name in folders:
        if (folder / name).exists() and not (folder / name).is_dir():
            raise UserError(f"{folder / name} is a file, where the run makes a folder; move it away")
    for name in files:
        if (folder / name).is_dir():
            raise UserError(f"{folder / name} is a folder, where the run makes a file; move it away")
    if (folder / "lock").is_file():
        with lock_workdir(workdir):
            pass


def read_config(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """The config.json of a workdir. Raises UserError, with file and line, for one that is broken."""
    path = pathlib.Path(workdir) / CONFIG
    cure = "put back the file that the run wrote, or delete that folder"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {cure}") from error
    try:
        value = json.loads(data.decode())
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8; {cure}"
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}); {cure}") from error
    except RecursionError as error:
        raise UserError(f"{path}: not valid JSON (nested too deeply); {cure}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}; {cure}")
    return rename_stored(value)


def read_identity(workdir: str | os.PathLike[str], *fields: str) -> dict[str, Any]:
    """What the config.json of a workdir says of its run, with these fields at least. Raises UserError as `read_config`."""
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
    """Raises UserError when the workdir holds a run of another config, naming each field that differs, or cannot be made.

    Args:
        workdir: folder of the run.
        config: its settings.
        may_differ: dotted names of fields, or of mappings of fields, that may be others.
        may_grow: those of numbers that may be larger than before. Returns the fields that are, with both values.
    """
    path = pathlib.Path(workdir) / CONFIG
    refuse_unwritable(workdir, "workdir")
    if not path.exists():
        if left := [what for place, what in RESUMABLE.items() if any(path.parent.glob(place))]:
            raise UserError(
                f"workdir {os.fspath(workdir)} holds {left[0]}, but not the config.json that says of which run; put that "
                "file back, choose another --workdir, or delete that folder."
            )
        return {}
    stored = _flat(read_config(workdir))
    given = _flat(json.loads(json.dumps(config)))
    names = sorted(n for n in stored.keys() | given.keys() if not _is_within(n, may_differ))
    # Runs from before there was one of these go on.
    new = [prefix for prefix in ADDED_FIELDS if not any(_is_within(n, (prefix,)) for n in stored)]
    grown = {
        n: (stored[n], given[n])
        for n in may_grow
        if n in stored and n in given and _grew(stored[n], given[n])
    }
    names = [n for n in names if n not in grown and not _is_within(n, tuple(new))]
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
    """Whether a dotted name is one of these fields, or lies in one."""
    return any(name == field or name.startswith(f"{field}.") for field in fields)


def _grew(before: Any, now: Any) -> bool:
    return isinstance(before, int | float) and isinstance(now, int | float) and now > before


def refuse_unwritable(folder: str | os.PathLike[str], option: str) -> None:
    """Raises UserError when the folder that the flag --`option` names is a file, cannot be made, or cannot be written to."""
    path = pathlib.Path(folder).absolute()
    for name in path.parts:
        if (size := len(os.fsencode(name))) > MAX_NAME_BYTES:
            raise UserError(
                f"{option} {name[:40]}...: a name of {size} bytes is too long for the file system, which takes {MAX_NAME_BYTES}; "
                f"choose a shorter --{option}."
            )
    if path.is_file():
        raise UserError(
            f"{option} {os.fspath(folder)} is a file; choose a folder, or one that is not there yet."
        )
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        reason = "cannot be written to" if there.is_dir() else "is a file"
        raise UserError(f"{option} {os.fspath(folder)}: {there} {reason}; choose another --{option}.")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out
