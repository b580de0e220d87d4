"""The manifest of a run: command, resolved settings, commit, seconds over all attempts, and whether the run is finished.

It lies beside the folder of the run. Read `load_manifest` first.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rrl.config.renamed import new_name, rename_stored
from rrl.errors import UserError
from rrl.eval.settings import with_defaults as eval_defaults
from rrl.files import atomic_stream
from rrl.recipes.catalogue import make_recipe
from rrl.runs.launcher import load_config
from rrl.setup import settings as train_settings
from rrl.setup.automatic import resolve_automatic
from rrl.sft import stages
from rrl.studies.reproduction.plan import PlannedRun


@dataclasses.dataclass(frozen=True)
class RunManifest:
    """The state of a run that was started, as stored beside its folder."""

    command: Sequence[str]
    """Arguments of `python`, with "{out}" for the folder of all runs."""
    settings: Mapping[str, Any]
    """All fields of the resolved config. Comments in a config file and the file that defines a value therefore make no
    difference."""
    commit: str
    """Commit at which its last attempt started."""
    seconds: float = 0.0
    """Sum over all attempts."""
    finished: bool = False

    def save(self, file: Path) -> None:
        """Write the manifest as JSON."""
        with atomic_stream(file) as stream:
            stream.write(json.dumps(dataclasses.asdict(self), indent=2).encode() + b"\n")


def load_manifest(run: PlannedRun, out: Path, allow_mismatch: bool = False) -> RunManifest | None:
    """Return the manifest of a run, or None if it was never started.

    Raises:
      UserError: the file is damaged; or another command or other settings produced the run, unless `allow_mismatch`.
    """
    file = manifest_file(run, out)
    if not file.exists():
        return None
    try:
        manifest = RunManifest(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}); delete it and {out / run.name}") from error
    if not allow_mismatch and (why := manifest_mismatch(manifest, run)):
        raise UserError(f"{out / run.name} {why}; delete that folder and {file}, or give another --out")
    return manifest


def manifest_mismatch(manifest: RunManifest, run: PlannedRun) -> str:
    """Return why today's command would not produce the run of the manifest; "" if it would.

    Config fields that were added since are ignored if the command is the same. A different command is
    accepted if it resolves to the same settings, for example if a default has changed and the plan now
    states the old value.
    """
    old, new, settings = list(manifest.command), run.command("{out}"), resolved_settings(run)
    if old != new and (
        _without_config(old) != _without_config(new) or _completed_settings(manifest, run) != settings
    ):
        return f"was made by {' '.join(old)}, not by {' '.join(new)}"
    return _first_difference(rename_stored(manifest.settings), settings)


def _without_config(command: Sequence[str]) -> list[str]:
    return [part for part in command if not part.startswith("--config")]


def _completed_settings(manifest: RunManifest, run: PlannedRun) -> Any:
    """Return the settings of a manifest with all fields that today's config has.

    Fields in the manifest have their stored values. New fields get their defaults (`with_defaults`). New fields without a default
    get the values that the command of the manifest resolves to today.

    None if that command is no longer valid.
    """
    flags = [part.removeprefix("--config") for part in manifest.command if part.startswith("--config")]
    if not flags or not flags[0].startswith("="):
        return None
    fields = {
        new_name(name): value
        for name, _, value in (flag.removeprefix(".").partition("=") for flag in flags[1:])
    }
    with_defaults = {
        "train": train_settings.with_defaults,
        "sft": stages.with_defaults,
        "eval": eval_defaults,
    }
    try:
        current = resolved_settings(dataclasses.replace(run, config=flags[0][1:], fields=fields))
        stored = with_defaults[run.launcher](
            ConfigDict(_merged(_empty_sections(current), rename_stored(manifest.settings)))
        )
        complete = _without_auto(stored.to_dict())
    except (UserError, AttributeError, KeyError):  # the stored settings no longer form a config
        return None
    return _merged(current, json.loads(json.dumps(complete, default=str)))


def _empty_sections(settings: Any) -> dict[str, Any]:
    """Return the sections of a config, without fields."""
    return {key: _empty_sections(value) for key, value in settings.items() if isinstance(value, Mapping)}


def _merged(base: Any, override: Any) -> Any:
    """Return nested mappings merged; values of `override` replace those of `base`."""
    if not (isinstance(base, Mapping) and isinstance(override, Mapping)):
        return override
    both = {key: _merged(base[key], override[key]) for key in base.keys() & override.keys()}
    return {**base, **override, **both}


def _first_difference(stored: Any, current: Any, name: str = "") -> str:
    """Return a phrase for the first setting that has another value now; "" if there is none."""
    if isinstance(stored, Mapping) and isinstance(current, Mapping):
        inside = (
            _first_difference(value, current.get(key), f"{name}.{key}" if name else key)
            for key, value in stored.items()
        )
        return next(filter(None, inside), "")
    return "" if stored == current else f"was made with {name}={stored!r}, which is {current!r} today"


def resolved_settings(run: PlannedRun) -> dict[str, Any]:
    """Return all fields of the config that the run's command resolves to today, as JSON values.

    A field that is "auto" is resolved too: it stands for a number that depends on other fields.
    """
    file = Path(run.config.partition(":")[0])
    if not file.is_file():
        raise UserError(f"config file {file} does not exist; start in the root folder of the repository")
    overrides = (f"{field}={value}" for field, value in run.fields.items())
    return json.loads(_settings(file.read_bytes(), run.config, *overrides))


@functools.cache
def _settings(_: bytes, config: str, *overrides: str) -> str:
    """Return the resolved config as JSON. The bytes of the file are part of the cache key, so an edited
    file is read again."""
    settings = load_config(config, overrides).to_dict()
    return json.dumps(_without_auto(settings), sort_keys=True, default=str)


def _without_auto(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config in which no field is "auto". Only training configs have such fields."""
    if "objective" not in settings or "recipe" not in settings:
        return settings
    fields = dict(settings["recipe"])
    recipe = make_recipe(fields.pop("name"), fields, fields.pop("environment", {}))
    return resolve_automatic(settings, recipe)


def manifest_file(run: PlannedRun, out: Path) -> Path:
    """Return the path of a run's manifest."""
    return out / f"{run.name}.json"


def run_states(runs: Sequence[PlannedRun], out: Path) -> list[dict[str, Any]]:
    """Return name, state, minutes (measured, or estimated if unfinished), command and commit of each run."""
    rows = []
    for run in runs:
        manifest = load_manifest(run, out)
        state = "to do" if manifest is None else "finished" if manifest.finished else "interrupted"
        finished = manifest is not None and manifest.finished
        rows.append(
            {
                "name": run.name,
                "state": state,
                "minutes": manifest.seconds / 60 if manifest is not None and finished else run.minutes,
                "command": "python " + " ".join(run.command(out)),
                "commit": manifest.commit if manifest is not None else "",
            }
        )
    return rows
