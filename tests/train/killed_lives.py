"""Runs launch/train.py or launch/sft.py, kills it many times and continues it with the same command.

    python killed_lives.py KILLS WORKDIR LAST LAUNCHER FLAG...

First it runs the launcher to its end and renames the workdir to WORKDIR.whole. Then it runs it again with KILLS kills by
SIGKILL. LAST is the number of the last update. Each process of the run ("life") is a fork of this process, which has imported
all packages but not started JAX; that saves the imports, half of the time of so small a run. It prints as JSON the phase in
which each life was killed, and the longest delay after the start of each phase.
"""

import json
import math
import os
import pathlib
import random
import runpy
import signal
import sys
import time

TIMEOUT = 300
"""Seconds after which a life counts as hanging."""
POLL = 0.002


def begin(launcher: str, flags: list[str], log: pathlib.Path) -> int:
    """Start a life, append its output to `log`, and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    with log.open("ab", buffering=0) as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    sys.argv = [launcher, *flags]
    code: object = None
    try:
        runpy.run_path(launcher, run_name="__main__")
    except SystemExit as error:
        code = error.code
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


PHASES = ("start", "steps", "report")


class Watch:
    """Follows a life by its metrics file and records when it reaches each of `PHASES`."""

    def __init__(self, workdir: pathlib.Path, last: int) -> None:
        self._file, self._last = workdir / "metrics.jsonl", last
        self._inode = self._stat()[0]
        self._opened: tuple[int, int] | None = None
        self.times: dict[str, float] = {}
        """Time at which each phase was reached."""

    def look(self) -> None:
        """Record the phases that were reached since the last call."""
        inode, size = self._stat()
        if self._opened is None and inode not in (0, self._inode):
            self._opened = inode, size  # a resumed run replaces the file when it opens it
            self._reached("start")
        if self._opened not in (None, (inode, size)):
            self._reached("steps")
            line = self._file.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
            if f'"step": {self._last},'.encode() in line and b'"eval/' in line:
                self._reached("report")

    def _reached(self, phase: str) -> None:
        self.times.setdefault(phase, time.monotonic())

    def _stat(self) -> tuple[int, int]:
        if not self._file.exists():
            return 0, 0
        found = self._file.stat()
        return found.st_ino, found.st_size


def end(pid: int, watch: Watch, phase: str = "never", delay: float = 0.0) -> bool:
    """Kill a life `delay` seconds after it reaches a phase. Returns False if it ends before that."""
    started = time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        now = time.monotonic()
        if done:
            if code := os.waitstatus_to_exitcode(status):
                sys.exit(f"a life ended with {code}")
            return False
        watch.look()
        if now >= watch.times.get(phase, math.inf) + delay or now > started + TIMEOUT:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if now > started + TIMEOUT:
                sys.exit(f"a life did not end within {TIMEOUT} s")
            return True
        time.sleep(POLL)


def main(kills: int, workdir: pathlib.Path, last: int, launcher: str, flags: list[str]) -> None:
    """See the docstring of the module."""
    from rrl.parallel.runtime import prepare_host

    prepare_host(callbacks="train" in launcher)
    import rrl.sft.stages
    import rrl.train.experiment  # noqa: F401

    log = workdir.with_name(workdir.name + ".log")

    def life() -> tuple[int, Watch]:
        watch = Watch(workdir, last)
        return begin(launcher, flags, log), watch

    pid, whole = life()
    end(pid, whole)
    ends = [whole.times[phase] for phase in PHASES] + [time.monotonic()]
    most = {phase: ends[at + 1] - ends[at] for at, phase in enumerate(PHASES)}
    most["steps"] /= kills / 4  # so that each life leaves some steps to the next
    workdir.rename(workdir.with_name(workdir.name + ".whole"))
    # A tenth of the kills before the first step, half of them between steps, the others in the report.
    plan = ["start" if at % 10 == 0 else "steps" if at < 0.6 * kills else "report" for at in range(kills)]
    rng, killed = random.Random(0), []
    while len(killed) < kills:
        phase = plan[len(killed)]
        pid, watch = life()
        if end(pid, watch, phase, rng.uniform(0, most[phase])):
            killed.append(phase)
        else:  # it ended before it was killed
            most["report"] *= 0.9
            plan = ["report"] * kills
    pid, watch = life()
    end(pid, watch)
    print(json.dumps({"killed": killed, "most": most}))


if __name__ == "__main__":
    main(int(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
