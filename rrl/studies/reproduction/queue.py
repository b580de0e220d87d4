"""Execute planned runs as subprocesses, several at a time, each on its own share of the cores. Read `run_queue` first.

Finished runs are skipped; interrupted ones continue. The log and the manifest of a run lie beside its folder.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rrl.errors import UserError
from rrl.eval.provenance import current_commit
from rrl.files import exclusive_lock, shipped
from rrl.parallel.runtime import available_cores
from rrl.runs.launcher import EXIT_TRY_AGAIN
from rrl.stopping import StopSignal, stop_requested
from rrl.studies.reproduction.manifest import RunManifest, load_manifest, manifest_file, resolved_settings
from rrl.studies.reproduction.plan import PlannedRun

CAN_PIN_CORES = hasattr(os, "sched_setaffinity")
"""Whether the system (Linux) can pin a process to cores."""
POLL_SECONDS = 0.2
"""Seconds between two checks of the running processes."""

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class QueueResult:
    """Outcome of `run_queue`."""

    failed: Mapping[str, str]
    """Run that failed, or that needs a failed one -> reason."""
    stopped: bool = False
    """Whether a signal ended it; the same call continues."""
    retryable: bool = False
    """Whether all failures are due to an unavailable service; the same call continues."""


def _print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_queue(
    runs: Sequence[PlannedRun], out: Path, jobs: int, progress: Progress = _print_to_stderr
) -> QueueResult:
    """Execute the runs that are not finished, `jobs` at a time.

    Runs that need a failed run are skipped. On a signal, the running processes are asked to save and end.

    Args:
      runs: planned runs, each after those that it needs.
      out: folder of all runs.
      jobs: number of runs at a time.
      progress: receives one line per event; default: prints to stderr.

    Raises:
      UserError: as `core_shares` and `load_manifest`, or another process is running in `out`. Nothing is written then.
    """
    cores = core_shares(jobs)
    manifests = {run.name: load_manifest(run, out) for run in runs}
    if all(manifest is not None and manifest.finished for manifest in manifests.values()):
        return QueueResult({})
    out.mkdir(parents=True, exist_ok=True)
    with (
        exclusive_lock(out, f"out {out}: another process is running there. Wait for it, or stop it.") as lock,
        stop_requested() as stop,
    ):
        return _Queue(runs, out, manifests, cores, lock, progress).execute(stop)


class _Queue:
    """The runs of one call of `run_queue`: to do, active, done and failed."""

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        out: Path,
        manifests: Mapping[str, RunManifest | None],
        cores: Sequence[Sequence[int]],
        lock: int,
        progress: Progress,
    ) -> None:
        self._out, self._manifests, self._cores, self._lock = out, manifests, cores, lock
        self._progress, self._total = progress, len(runs)
        self._done = {
            name for name, manifest in manifests.items() if manifest is not None and manifest.finished
        }
        self._todo = [run for run in runs if run.name not in self._done]
        self._active: dict[int, _RunProcess] = {}
        """Index into `cores` -> the run on these cores."""
        self._failed: dict[str, str] = {}
        self._codes: set[int] = set()
        """Exit codes of the runs that failed."""

    def execute(self, stop: StopSignal) -> QueueResult:
        """Execute all runs. If `stop` is set or an error is raised, ask the active runs to end and wait for them."""
        try:
            while (self._todo or self._active) and not stop:
                self._start_ready()
                if not self._active:  # all remaining runs need a failed one
                    self._failed |= {run.name: f"needs {', '.join(run.needs)}" for run in self._todo}
                    break
                time.sleep(POLL_SECONDS)
                self._collect_ended()
        finally:
            for running in self._active.values():
                running.process.send_signal(signal.SIGTERM)
            for running in self._active.values():
                running.end(running.process.wait())
        return QueueResult(self._failed, bool(stop), self._codes == {EXIT_TRY_AGAIN})

    def _start_ready(self) -> None:
        """Start a run on each free share of the cores, as far as the runs that it needs are done."""
        for slot in sorted(set(range(len(self._cores))) - set(self._active)):
            ready = next((run for run in self._todo if self._done.issuperset(run.needs)), None)
            if ready is not None:
                self._todo.remove(ready)
                self._active[slot] = _RunProcess(
                    ready, self._out, self._manifests[ready.name], self._cores[slot], self._lock
                )
                self._progress(f"{ready.name} ...")

    def _collect_ended(self) -> None:
        """Move the runs whose processes have ended from active to done or failed."""
        for slot, running in list(self._active.items()):
            code = running.process.poll()
            if code is None:
                continue
            del self._active[slot]
            name, manifest = running.run.name, running.end(code)
            if code:
                self._codes.add(code)
                self._failed[name] = f"exit code {code}; see {running.log}"
                self._progress(f"{name}: {self._failed[name]}")
                continue
            self._done.add(name)
            unfinished = [*self._todo, *(other.run for other in self._active.values())]
            minutes_left = sum(run.minutes for run in unfinished) / len(self._cores)
            self._progress(
                f"{name}: {manifest.seconds / 60:.1f} minutes; {len(self._done)} of {self._total} finished, "
                f"about {minutes_left:.0f} minutes left"
            )


class _RunProcess:
    """The process of one run, from its start to its end. `previous` is the manifest of an interrupted attempt."""

    def __init__(
        self, run: PlannedRun, out: Path, previous: RunManifest | None, cores: Sequence[int], lock: int
    ) -> None:
        self.run, self._file, self._began = run, manifest_file(run, out), time.monotonic()
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
