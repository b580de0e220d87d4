"""Runs side by side, each on cores of its own, and what each took.

Beside a run's folder lie its log and its record: the command and the settings that make it, the commit, the seconds of all its
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

from rrl.errors import UserError
from rrl.eval import evaluate
from rrl.eval.result_card import commit_here
from rrl.files import atomic_stream, exclusive_lock
from rrl.parallel.runtime import available_cores
from rrl.runs.launcher import EXIT_TRY_AGAIN, load_config
from rrl.sft import stages
from rrl.stopping import stop_requested
from rrl.studies.reproduction.plan import Run
from rrl.train import experiment

PINS = hasattr(os, "sched_setaffinity")
"""Whether the system (Linux) gives a process cores of its own."""
POLL = 0.2
"""Seconds between looks at what runs."""


@dataclasses.dataclass(frozen=True)
class Record:
    """What is known of a run that was started."""

    command: Sequence[str]
    """With "{out}" for the folder of all runs."""
    settings: Mapping[str, Any]
    """All that the command's config comes to: what a comment says is none of them, and a value that several config files have
    from one place is one."""
    commit: str
    """Where its last life began."""
    seconds: float = 0.0
    """Of all lives."""
    finished: bool = False

    def save(self, file: Path) -> None:
        """Writes it as JSON."""
        with atomic_stream(file) as stream:
            stream.write(json.dumps(dataclasses.asdict(self), indent=2).encode() + b"\n")


def record_of(run: Run, out: Path, others: bool = False) -> Record | None:
    """The record of a run, if it was ever started.

    Raises UserError for a damaged one, and for one that another command or other settings made, unless that is given too
    (`others`).
    """
    file = _file(run, out)
    if not file.exists():
        return None
    try:
        found = Record(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}); delete it and {out / run.name}") from error
    if not others and (why := unlike(found, run)):
        raise UserError(f"{out / run.name} {why}; delete that folder and {file}, or give another --out")
    return found


def unlike(record: Record, run: Run) -> str:
    """Why the command as it is today would not make what the record is of; "" where it would.

    Where the command is the same, settings that came later are taken for what was done before there was a choice. Another command
    may come to the same settings, as where a config has moved on and the plan names what it was.
    """
    was, now, settings = list(record.command), run.command("{out}"), settings_of(run)
    if was != now and (_beside_config(was) != _beside_config(now) or _whole(record, run) != settings):
        return f"was made by {' '.join(was)}, not by {' '.join(now)}"
    return _changed(record.settings, settings)


def _beside_config(command: Sequence[str]) -> list[str]:
    return [part for part in command if not part.startswith("--config")]


def _whole(record: Record, run: Run) -> Any:
    """The settings of a record, with those that came later: a field at its default, all else as its command has it today; None
    where that is no command today."""
    flags = [part.removeprefix("--config") for part in record.command if part.startswith("--config")]
    if not flags or not flags[0].startswith("="):
        return None
    fields = dict(flag.removeprefix(".").split("=", 1) for flag in flags[1:])
    filled = {"train": experiment.with_defaults, "sft": stages.with_defaults, "eval": evaluate.with_defaults}
    try:
        today = settings_of(dataclasses.replace(run, config=flags[0][1:], fields=fields))
        was = filled[run.launcher](ConfigDict(_over(_outline(today), record.settings)))
    except (UserError, AttributeError, KeyError):  # a record too old to be a config
        return None
    return _over(today, json.loads(json.dumps(was.to_dict(), default=str)))


def _outline(settings: Any) -> dict[str, Any]:
    """Its sections, without fields."""
    return {key: _outline(value) for key, value in settings.items() if isinstance(value, Mapping)}


def _over(below: Any, above: Any) -> Any:
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    both = {key: _over(below[key], above[key]) for key in below.keys() & above.keys()}
    return {**below, **above, **both}


def _changed(was: Any, now: Any, name: str = "") -> str:
    """The first setting that is another one now, in words."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        inside = (
            _changed(value, now.get(key), f"{name}.{key}" if name else key) for key, value in was.items()
        )
        return next(filter(None, inside), "")
    return "" if was == now else f"was made with {name}={was!r}, which is {now!r} today"


def work(
    runs: Sequence[Run],
    out: Path,
    jobs: int,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> "Work":
    """Does what is not finished, `jobs` runs at a time.

    What needs a failed run is left. On a signal the runs are told to save and end. Raises UserError as `shares` and `record_of`,
    and where another process runs in `out`, before anything is written.
    """
    cores = shares(jobs)
    found = {run.name: record_of(run, out) for run in runs}
    done = {name for name, record in found.items() if record is not None and record.finished}
    todo = [run for run in runs if run.name not in done]
    if not todo:
        return Work({})
    out.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    codes: set[int] = set()
    active: dict[int, _Life] = {}
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
                        active[place] = _Life(ready, out, found[ready.name], cores[place], lock)
                        say(f"{ready.name} ...")
                if not active:  # what is left needs what failed
                    failed |= {run.name: f"needs {', '.join(run.needs)}" for run in todo}
                    break
                time.sleep(POLL)
                for place, life in list(active.items()):
                    code = life.process.poll()
                    if code is None:
                        continue
                    del active[place]
                    record = life.end(code)
                    if code:
                        codes.add(code)
                        failed[life.run.name] = f"exit code {code}; see {life.log}"
                        say(f"{life.run.name}: {failed[life.run.name]}")
                    else:
                        done.add(life.run.name)
                        left = sum(r.minutes for r in [*todo, *(a.run for a in active.values())]) / jobs
                        say(
                            f"{life.run.name}: {record.seconds / 60:.1f} minutes; {len(done)} of {len(runs)} are there, some "
                            f"{left:.0f} minutes left"
                        )
        finally:
            for life in active.values():
                life.process.send_signal(signal.SIGTERM)
            for life in active.values():
                life.end(life.process.wait())
    return Work(failed, bool(stop), codes == {EXIT_TRY_AGAIN})


@dataclasses.dataclass(frozen=True)
class Work:
    """What came of it."""

    failed: Mapping[str, str]
    """Runs that failed, or need one that did, with the reason."""
    stopped: bool = False
    """By a signal; the same call goes on."""
    again: bool = False
    """Whether all that failed did so because a service was away; the same call goes on."""


class _Life:
    """A run's process, from its start to its end."""

    def __init__(self, run: Run, out: Path, before: Record | None, cores: Sequence[int], lock: int) -> None:
        self.run, self._file, self._began = run, _file(run, out), time.monotonic()
        self.log = out / f"{run.name}.log"
        self._record = Record(
            run.command("{out}"),
            settings_of(run),
            commit_here(),
            before.seconds if before is not None else 0.0,
        )
        self._record.save(self._file)
        with self.log.open("a", encoding="utf-8") as stream:
            # A run that outlives us, when we are killed, keeps others out as well.
            self.process = subprocess.Popen(
                [sys.executable, *run.command(out)],
                stdout=stream,
                stderr=subprocess.STDOUT,
                pass_fds=[lock],
            )
        if cores:  # its threads, which come later, have the same
            os.sched_setaffinity(self.process.pid, cores)

    def end(self, code: int) -> Record:
        """Writes down how long it took, and whether it is done."""
        took = self._record.seconds + time.monotonic() - self._began
        record = dataclasses.replace(self._record, seconds=took, finished=code == 0)
        record.save(self._file)
        return record


def shares(jobs: int) -> list[list[int]]:
    """The cores of each of so many runs; empty lists where the system has no such thing.

    Raises UserError for more runs than cores.
    """
    known = sorted(os.sched_getaffinity(0)) if PINS else []
    if not 1 <= jobs <= available_cores():
        raise UserError(f"jobs={jobs} must be 1 to {available_cores()}, the cores that there are")
    return [known[place::jobs] for place in range(jobs)]


def _file(run: Run, out: Path) -> Path:
    return out / f"{run.name}.json"


def settings_of(run: Run) -> dict[str, Any]:
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


def as_rows(runs: Sequence[Run], out: Path) -> list[dict[str, Any]]:
    """Each run with its state and minutes: those that it took, or about those that it will."""
    rows = []
    for run in runs:
        record = record_of(run, out)
        state = "to do" if record is None else "finished" if record.finished else "broken off"
        finished = record is not None and record.finished
        rows.append(
            {
                "name": run.name,
                "state": state,
                "minutes": record.seconds / 60 if record is not None and finished else run.minutes,
                "command": "python " + " ".join(run.command(out)),
                "commit": record.commit if record is not None else "",
            }
        )
    return rows
