"""Executes planned runs as subprocesses, several at a time, each on its own share of the cores. Read
`run_queue` first.

Beside the folder of a run lie its log and its manifest: command, resolved settings, commit, seconds
over all attempts, and whether the run is finished. Finished runs are skipped; interrupted ones
continue.
"""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rrl.config.renamed import new_name, rename_stored
from rrl.errors import UserError
from rrl.eval.provenance import current_commit
from rrl.eval.settings import with_defaults as eval_defaults
from rrl.files import atomic_stream, exclusive_lock, shipped
from rrl.parallel.runtime import available_cores
from rrl.runs.launcher import EXIT_TRY_AGAIN, load_config
from rrl.sft import stages
from rrl.stopping import stop_requested
from rrl.studies.reproduction.plan import PlannedRun
from rrl.train import settings as train_settings

CAN_PIN_CORES = hasattr(os, "sched_setaffinity")
"""Whether the system (Linux) can pin a process to cores."""
POLL_SECONDS = 0.2
"""Seconds between two checks of the running processes."""


@dataclasses.dataclass(frozen=True)
class RunManifest:
    """The state of a run that was started, as stored beside its folder."""

    command: Sequence[str]
    """Arguments of `python`, with "{out}" for the folder of all runs."""
    settings: Mapping[str, Any]
    """All fields of the resolved config. Comments in a config file and the file that defines a value
    therefore make no difference."""
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
      UserError: the file is damaged; or another command or other settings produced the run, unless
        `allow_mismatch`: then its manifest is returned all the same.
    """
    file = _manifest_file(run, out)
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
    return _first_change(rename_stored(manifest.settings), settings)


def _without_config(command: Sequence[str]) -> list[str]:
    return [part for part in command if not part.startswith("--config")]


def _completed_settings(manifest: RunManifest, run: PlannedRun) -> Any:
    """Return the settings of a manifest, extended by the fields that were added since.

    Fields that were added to a stored section have their defaults. For sections that the manifest lacks, the
    values are those that its command resolves to today. None if that command is no longer valid.
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
    except (UserError, AttributeError, KeyError):  # the stored settings no longer form a config
        return None
    return _merged(current, json.loads(json.dumps(stored.to_dict(), default=str)))


def _empty_sections(settings: Any) -> dict[str, Any]:
    """Return the sections of a config, without fields."""
    return {key: _empty_sections(value) for key, value in settings.items() if isinstance(value, Mapping)}


def _merged(base: Any, override: Any) -> Any:
    """Return nested mappings merged; values of `override` replace those of `base`."""
    if not (isinstance(base, Mapping) and isinstance(override, Mapping)):
        return override
    both = {key: _merged(base[key], override[key]) for key in base.keys() & override.keys()}
    return {**base, **override, **both}


def _first_change(was: Any, now: Any, name: str = "") -> str:
    """Return a phrase for the first setting that has another value now; "" if there is none."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        inside = (
            _first_change(value, now.get(key), f"{name}.{key}" if name else key) for key, value in was.items()
        )
        return next(filter(None, inside), "")
    return "" if was == now else f"was made with {name}={was!r}, which is {now!r} today"


def run_queue(
    runs: Sequence[PlannedRun],
    out: Path,
    jobs: int,
    progress: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> "QueueResult":
    """Execute the runs that are not finished, `jobs` at a time.

    Runs that need a failed run are skipped. On a signal, the running processes are asked to save and
    end.

    Args:
      runs: planned runs, each after those that it needs.
      out: folder of all runs.
      jobs: number of runs at a time.
      progress: receives one line per event; default: prints to stderr.

    Raises:
      UserError: as `core_shares` and `load_manifest`, or another process is running in `out`. Nothing
        is written then.
    """
    cores = core_shares(jobs)
    manifests = {run.name: load_manifest(run, out) for run in runs}
    done = {name for name, manifest in manifests.items() if manifest is not None and manifest.finished}
    todo = [run for run in runs if run.name not in done]
    if not todo:
        return QueueResult({})
    out.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    codes: set[int] = set()
    active: dict[int, _RunProcess] = {}
    with (
        exclusive_lock(out, f"out {out}: another process is running there. Wait for it, or stop it.") as lock,
        stop_requested() as stop,
    ):
        try:
            while (todo or active) and not stop:
                for slot in sorted(set(range(jobs)) - set(active)):
                    ready = next((run for run in todo if done.issuperset(run.needs)), None)
                    if ready is not None:
                        todo.remove(ready)
                        active[slot] = _RunProcess(ready, out, manifests[ready.name], cores[slot], lock)
                        progress(f"{ready.name} ...")
                if not active:  # all remaining runs need a failed one
                    failed |= {run.name: f"needs {', '.join(run.needs)}" for run in todo}
                    break
                time.sleep(POLL_SECONDS)
                for slot, running in list(active.items()):
                    code = running.process.poll()
                    if code is None:
                        continue
                    del active[slot]
                    manifest = running.end(code)
                    if code:
                        codes.add(code)
                        failed[running.run.name] = f"exit code {code}; see {running.log}"
                        progress(f"{running.run.name}: {failed[running.run.name]}")
                    else:
                        done.add(running.run.name)
                        left = sum(r.minutes for r in [*todo, *(a.run for a in active.values())]) / jobs
                        progress(
                            f"{running.run.name}: {manifest.seconds / 60:.1f} minutes; {len(done)} of {len(runs)} finished, "
                            f"about {left:.0f} minutes left"
                        )
        finally:
            for running in active.values():
                running.process.send_signal(signal.SIGTERM)
            for running in active.values():
                running.end(running.process.wait())
    return QueueResult(failed, bool(stop), codes == {EXIT_TRY_AGAIN})


@dataclasses.dataclass(frozen=True)
class QueueResult:
    """Outcome of `run_queue`."""

    failed: Mapping[str, str]
    """Run that failed, or that needs a failed one -> reason."""
    stopped: bool = False
    """Whether a signal ended it; the same call continues."""
    retryable: bool = False
    """Whether all failures are due to an unavailable service; the same call continues."""


class _RunProcess:
    """The process of one run, from its start to its end. `previous` is the manifest of an interrupted attempt."""

    def __init__(
        self, run: PlannedRun, out: Path, previous: RunManifest | None, cores: Sequence[int], lock: int
    ) -> None:
        self.run, self._file, self._began = run, _manifest_file(run, out), time.monotonic()
        self.log = out / f"{run.name}.log"
        self._manifest = RunManifest(
            run.command("{out}"),
            resolved_settings(run),
            current_commit(),
            previous.seconds if previous is not None else 0.0,
        )
        self._manifest.save(self._file)
        with self.log.open("a", encoding="utf-8") as stream:
            # The child inherits the lock: if this process is killed, the surviving run still holds it.
            launcher, *flags = run.command(out)
            self.process = subprocess.Popen(
                [sys.executable, str(shipped(launcher)), *flags],
                stdout=stream,
                stderr=subprocess.STDOUT,
                pass_fds=[lock],
            )
        if cores:  # threads that it starts later inherit the affinity
            os.sched_setaffinity(self.process.pid, cores)

    def end(self, code: int) -> RunManifest:
        """Store how long the run took and whether it is finished."""
        seconds = self._manifest.seconds + time.monotonic() - self._began
        manifest = dataclasses.replace(self._manifest, seconds=seconds, finished=code == 0)
        manifest.save(self._file)
        return manifest


def core_shares(jobs: int) -> list[list[int]]:
    """Return the cores of each of `jobs` concurrent runs; empty lists if the system cannot pin cores.

    Raises UserError for more runs than cores.
    """
    available = sorted(os.sched_getaffinity(0)) if CAN_PIN_CORES else []
    if not 1 <= jobs <= available_cores():
        raise UserError(f"jobs={jobs} must be 1 to {available_cores()}, the number of available cores")
    return [available[slot::jobs] for slot in range(jobs)]


def _manifest_file(run: PlannedRun, out: Path) -> Path:
    return out / f"{run.name}.json"


def resolved_settings(run: PlannedRun) -> dict[str, Any]:
    """Return all fields of the config that the run's command resolves to today, as JSON values."""
    file = Path(run.config.partition(":")[0])
    if not file.is_file():
        raise UserError(f"config file {file} does not exist; start in the root folder of the repository")
    overrides = (f"{field}={value}" for field, value in run.fields.items())
    return json.loads(_settings(file.read_bytes(), run.config, *overrides))


@functools.cache
def _settings(_: bytes, config: str, *overrides: str) -> str:
    """Return the resolved config as JSON. The bytes of the file are part of the cache key, so an edited
    file is read again."""
    return json.dumps(load_config(config, overrides).to_dict(), sort_keys=True, default=str)


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
