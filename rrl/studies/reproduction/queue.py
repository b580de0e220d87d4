"""Runs side by side, each on cores of its own, and what each took.

Beside a run's folder lie its log and its manifest: the command and the settings that make it, the commit, the seconds of all its
lives, and whether it is finished. What is finished is not run again; what was broken off goes on.
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
from rrl.eval import evaluate
from rrl.eval.result_card import commit_here
from rrl.files import atomic_stream, exclusive_lock, shipped
from rrl.parallel.runtime import available_cores
from rrl.runs.launcher import EXIT_TRY_AGAIN, load_config
from rrl.sft import stages
from rrl.stopping import stop_requested
from rrl.studies.reproduction.plan import PlannedRun
from rrl.train import experiment

CAN_PIN_CORES = hasattr(os, "sched_setaffinity")
"""Whether the system (Linux) gives a process cores of its own."""
POLL_SECONDS = 0.2
"""Seconds between looks at what runs."""


@dataclasses.dataclass(frozen=True)
class RunManifest:
    """What is known of a run that was started."""

    command: Sequence[str]
    """With "{out}" for the folder of all runs."""
    settings: Mapping[str, Any]
    """All that the command's config comes to: what a comment says is none of them, and a value that several config files have
    from one place is one."""
    commit: str
    """Where its last process began."""
    seconds: float = 0.0
    """Of all lives."""
    finished: bool = False

    def save(self, file: Path) -> None:
        """Writes it as JSON."""
        with atomic_stream(file) as stream:
            stream.write(json.dumps(dataclasses.asdict(self), indent=2).encode() + b"\n")


def load_manifest(run: PlannedRun, out: Path, allow_mismatch: bool = False) -> RunManifest | None:
    """The manifest of a run, if it was ever started.

    Raises UserError for a damaged one, and for one that another command or other settings made, unless that is given too
    (`allow_mismatch`).
    """
    file = _manifest_file(run, out)
    if not file.exists():
        return None
    try:
        found = RunManifest(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}); delete it and {out / run.name}") from error
    if not allow_mismatch and (why := manifest_mismatch(found, run)):
        raise UserError(f"{out / run.name} {why}; delete that folder and {file}, or give another --out")
    return found


def manifest_mismatch(manifest: RunManifest, run: PlannedRun) -> str:
    """Why the command as it is today would not make what the manifest is of; "" where it would.

    Where the command is the same, settings that came later are taken for what was done before there was a choice. Another command
    may come to the same settings, as where a config has moved on and the plan names what it was.
    """
    was, now, settings = list(manifest.command), run.command("{out}"), resolved_settings(run)
    if was != now and (
        _without_config(was) != _without_config(now) or _completed_settings(manifest, run) != settings
    ):
        return f"was made by {' '.join(was)}, not by {' '.join(now)}"
    return _first_change(rename_stored(manifest.settings), settings)


def _without_config(command: Sequence[str]) -> list[str]:
    return [part for part in command if not part.startswith("--config")]


def _completed_settings(manifest: RunManifest, run: PlannedRun) -> Any:
    """The settings of a manifest, with those that came later: a field at its default, all else as its command has it today; None
    where that is no command today."""
    flags = [part.removeprefix("--config") for part in manifest.command if part.startswith("--config")]
    if not flags or not flags[0].startswith("="):
        return None
    fields = {
        new_name(name): value
        for name, _, value in (flag.removeprefix(".").partition("=") for flag in flags[1:])
    }
    filled = {"train": experiment.with_defaults, "sft": stages.with_defaults, "eval": evaluate.with_defaults}
    try:
        today = resolved_settings(dataclasses.replace(run, config=flags[0][1:], fields=fields))
        was = filled[run.launcher](
            ConfigDict(_overlaid(_empty_sections(today), rename_stored(manifest.settings)))
        )
    except (UserError, AttributeError, KeyError):  # a manifest too old to be a config
        return None
    return _overlaid(today, json.loads(json.dumps(was.to_dict(), default=str)))


def _empty_sections(settings: Any) -> dict[str, Any]:
    """Its sections, without fields."""
    return {key: _empty_sections(value) for key, value in settings.items() if isinstance(value, Mapping)}


def _overlaid(below: Any, above: Any) -> Any:
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    both = {key: _overlaid(below[key], above[key]) for key in below.keys() & above.keys()}
    return {**below, **above, **both}


def _first_change(was: Any, now: Any, name: str = "") -> str:
    """The first setting that is another one now, in words."""
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
    """Does what is not finished, `jobs` runs at a time.

    What needs a failed run is left. On a signal the runs are told to save and end. Raises UserError as `core_shares` and
    `load_manifest`, and where another process runs in `out`, before anything is written.
    """
    cores = core_shares(jobs)
    found = {run.name: load_manifest(run, out) for run in runs}
    done = {name for name, manifest in found.items() if manifest is not None and manifest.finished}
    todo = [run for run in runs if run.name not in done]
    if not todo:
        return QueueResult({})
    out.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    codes: set[int] = set()
    active: dict[int, _RunProcess] = {}
    with (
        exclusive_lock(out, f"out {out}: another process runs there. Wait for that, or stop it.") as lock,
        stop_requested() as stop,
    ):
        try:
            while (todo or active) and not stop:
                for place in sorted(set(range(jobs)) - set(active)):
                    ready = next((run for run in todo if done.issuperset(run.needs)), None)
                    if ready is not None:
                        todo.remove(ready)
                        active[place] = _RunProcess(ready, out, found[ready.name], cores[place], lock)
                        progress(f"{ready.name} ...")
                if not active:  # what is left needs what failed
                    failed |= {run.name: f"needs {', '.join(run.needs)}" for run in todo}
                    break
                time.sleep(POLL_SECONDS)
                for place, running in list(active.items()):
                    code = running.process.poll()
                    if code is None:
                        continue
                    del active[place]
                    manifest = running.end(code)
                    if code:
                        codes.add(code)
                        failed[running.run.name] = f"exit code {code}; see {running.log}"
                        progress(f"{running.run.name}: {failed[running.run.name]}")
                    else:
                        done.add(running.run.name)
                        left = sum(r.minutes for r in [*todo, *(a.run for a in active.values())]) / jobs
                        progress(
                            f"{running.run.name}: {manifest.seconds / 60:.1f} minutes; {len(done)} of {len(runs)} are there, "
                            f"some {left:.0f} minutes left"
                        )
        finally:
            for running in active.values():
                running.process.send_signal(signal.SIGTERM)
            for running in active.values():
                running.end(running.process.wait())
    return QueueResult(failed, bool(stop), codes == {EXIT_TRY_AGAIN})


@dataclasses.dataclass(frozen=True)
class QueueResult:
    """What came of it."""

    failed: Mapping[str, str]
    """Runs that failed, or need one that did, with the reason."""
    stopped: bool = False
    """By a signal; the same call goes on."""
    retryable: bool = False
    """Whether all that failed did so because a service was away; the same call goes on."""


class _RunProcess:
    """A run's process, from its start to its end."""

    def __init__(
        self, run: PlannedRun, out: Path, before: RunManifest | None, cores: Sequence[int], lock: int
    ) -> None:
        self.run, self._file, self._began = run, _manifest_file(run, out), time.monotonic()
        self.log = out / f"{run.name}.log"
        self._manifest = RunManifest(
            run.command("{out}"),
            resolved_settings(run),
            commit_here(),
            before.seconds if before is not None else 0.0,
        )
        self._manifest.save(self._file)
        with self.log.open("a", encoding="utf-8") as stream:
            # A run that outlives us, when we are killed, keeps others out as well.
            launcher, *flags = run.command(out)
            self.process = subprocess.Popen(
                [sys.executable, str(shipped(launcher)), *flags],
                stdout=stream,
                stderr=subprocess.STDOUT,
                pass_fds=[lock],
            )
        if cores:  # its threads, which come later, have the same
            os.sched_setaffinity(self.process.pid, cores)

    def end(self, code: int) -> RunManifest:
        """Writes down how long it took, and whether it is done."""
        took = self._manifest.seconds + time.monotonic() - self._began
        manifest = dataclasses.replace(self._manifest, seconds=took, finished=code == 0)
        manifest.save(self._file)
        return manifest


def core_shares(jobs: int) -> list[list[int]]:
    """The cores of each of so many runs; empty lists where the system has no such thing.

    Raises UserError for more runs than cores.
    """
    known = sorted(os.sched_getaffinity(0)) if CAN_PIN_CORES else []
    if not 1 <= jobs <= available_cores():
        raise UserError(f"jobs={jobs} must be 1 to {available_cores()}, the cores that there are")
    return [known[place::jobs] for place in range(jobs)]


def _manifest_file(run: PlannedRun, out: Path) -> Path:
    return out / f"{run.name}.json"


def resolved_settings(run: PlannedRun) -> dict[str, Any]:
    """All that the config of a run's command comes to today, as JSON holds it."""
    file = Path(run.config.partition(":")[0])
    if not file.is_file():
        raise UserError(f"config file {file} is not there; start from the repository's folder")
    overrides = (f"{field}={value}" for field, value in run.fields.items())
    return json.loads(_settings(file.read_bytes(), run.config, *overrides))


@functools.cache
def _settings(_: bytes, config: str, *overrides: str) -> str:
    """The file's bytes stand among the arguments so that an edited file is read again."""
    return json.dumps(load_config(config, overrides).to_dict(), sort_keys=True, default=str)


def run_states(runs: Sequence[PlannedRun], out: Path) -> list[dict[str, Any]]:
    """Each run with its state and minutes: those that it took, or about those that it will."""
    rows = []
    for run in runs:
        manifest = load_manifest(run, out)
        state = "to do" if manifest is None else "finished" if manifest.finished else "broken off"
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
