"""The config of a workdir: a workdir belongs to one config. Read `refuse_other_config` first."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from rrl.config.renamed import rename_stored
from rrl.errors import UserError
from rrl.files import MAX_NAME_BYTES

CONFIG = "config.json"
"""File with the run's settings, as JSON."""
UNFINISHED_RESULTS: Mapping[str, str] = {
    "checkpoints/*": "checkpoints",
    "results.jsonl": "answers (results.jsonl)",
    "blocks/*.jsonl": "sampled trajectories (blocks)",
}
"""Glob pattern -> description of results that a run of the same config continues. A cold start samples its questions in blocks,
one file each (`rrl.sft.cold_start`)."""
ADDED_FIELDS = (
    "run.data.content",
    "run.tokenizer_sha256",
    "run.encoder_sha256",
    "content",
    "retriever.encoder_sha256",
    *(
        f"run.model.{field}"
        for field in ("local_rope_theta", "query_pre_attn_scalar", "sliding_layers", "sliding_window")
    ),
)
"""Fields of config.json that older versions did not write. A run without them may continue."""
ADDED_VALUES: Mapping[str, tuple[Any, ...]] = {
    f"{section}.weights": ("auto", "float32", "unpacked")
    for section in ("run.rollout", "run.reader_rollout", "rollout")
}
"""Further such fields -> the values with which a run without them may continue. Older versions computed in the run's dtype, so
their results must not be mixed with those of another number format that is set."""
MAX_DIFFERENCES = 6
"""Largest number of differing fields that an error message lists."""


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
    """Raise UserError if the workdir belongs to a run of another config. Return the fields of `may_grow` that have grown.

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
    # Added fields that the stored config lacks, because an older version wrote it. They are not compared.
    added = (*ADDED_FIELDS, *(n for n, allowed in ADDED_VALUES.items() if given.get(n) in allowed))
    unwritten = [prefix for prefix in added if not any(_is_within(n, (prefix,)) for n in stored)]
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
