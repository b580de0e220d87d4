"""A watchdog that logs what a rollout waits for when it makes no progress."""

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

CHECKS_PER_REPORT = 10
"""Number of checks in the time without progress after which the watchdog reports."""

MIN_COMPUTING_CORES = 0.05
"""A device that computes in this process uses at least this share of a core, even beside many other processes."""

MAX_COMPUTING_REPORTS = 10
"""After this many report intervals without progress, the watchdog reports an error even if the process uses the CPU: the CPU
time may be that of other threads."""

log = logging.getLogger(__name__)


class Watchdog:
    """A context manager that reports when `progress()` has not changed for some seconds.

    Two cases are logged as information: work before the rollout begins, such as compilation, and a long decode step while this
    process uses the CPU. Everything else is logged as an error with `describe()`.
    """

    def __init__(
        self,
        seconds: float,
        progress: Callable[[], int],
        describe: Callable[[], str],
        preparing: Callable[[], str] = lambda: "",
        computing: Callable[[], bool] = lambda: False,
    ) -> None:
        """Set up the watchdog; entering its `with` block starts it.

        Args:
          seconds: time without progress before a report, and between reports. 0: no reports.
          progress: returns a counter that changes with progress.
          describe: returns what the rollout waits for.
          preparing: returns the name of the work before the rollout begins; "" once it runs.
          computing: returns whether the rollout waits only for a device that computes on the cores of this process. Then the
            CPU time of the process shows whether it computes.
        """
        self._seconds, self._progress, self._describe = seconds, progress, describe
        self._preparing, self._computing = preparing, computing
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rrl-watchdog", daemon=True)
        self._last_progress, self._last_preparing = 0, ""
        """The last values of `progress()` and `preparing()`."""
        self._cpu_time = 0.0
        """CPU time of the process at the last progress or report, in seconds."""
        self._progressed = self._reported = 0.0
        """Time of the last progress; time of the last progress or report."""

    def __enter__(self) -> None:
        if self._seconds:
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        self.begin(time.monotonic(), time.process_time())
        while not self._stopped.wait(self._seconds / CHECKS_PER_REPORT):
            self.check(time.monotonic(), time.process_time())

    def begin(self, now: float, cpu_time: float) -> None:
        """Restart the clock. `now` is the time, `cpu_time` the CPU time of the process; both in seconds."""
        self._last_progress, self._last_preparing = self._progress(), self._preparing()
        self._progressed = self._reported = now
        self._cpu_time = cpu_time

    def check(self, now: float, cpu_time: float) -> None:
        """Report if there was no progress for long enough. Arguments as for `begin`."""
        if self._progress() != self._last_progress or self._preparing() != self._last_preparing:
            self.begin(now, cpu_time)
        elif now - self._reported >= self._seconds:
            self._report(now - self._progressed, (cpu_time - self._cpu_time) / (now - self._reported))
            self._reported, self._cpu_time = now, cpu_time

    def _report(self, waited: float, cores: float) -> None:
        """`cores` is the average number of cores that the process used since the last report."""
        if self._last_preparing:
            log.info("the rollout has not begun; for %.0f s: %s", waited, self._last_preparing)
        elif (
            self._computing()
            and cores >= MIN_COMPUTING_CORES
            and waited < MAX_COMPUTING_REPORTS * self._seconds
        ):
            log.info(
                "the device has been computing for %.0f s, on %.1f cores: %s", waited, cores, self._describe()
            )
        else:
            log.error("the rollout made no progress for %g s: %s", self._seconds, self._describe())
