"""Reports what a rollout is waiting for when nothing moves: a hang whose place is named is half mended."""

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

CHECKS_PER_REPORT = 10
"""The watchdog looks so many times in the seconds after which it reports."""

MIN_COMPUTING_CORES = 0.05
"""A device that computes in this process uses at least such a share of a core, however many other processes there are."""

MAX_COMPUTING_REPORTS = 10
"""After so many times the seconds without progress, a device that seems to compute has stalled, too: other threads of the process
may be what is busy."""

log = logging.getLogger(__name__)


class Watchdog:
    """While its block runs: reports when `progress()` has not changed for some seconds.

    What is no stall is logged as information: work before the rollout begins, such as compiling, for which the clock does not
    run, and a decode step that takes long, as long as this process computes. Everything else is an error that names `describe()`.
    """

    def __init__(
        self,
        seconds: float,
        progress: Callable[[], int],
        describe: Callable[[], str],
        preparing: Callable[[], str] = lambda: "",
        computing: Callable[[], bool] = lambda: False,
    ) -> None:
        """Reports after so many `seconds`, and after as many more each time (0: never).

        Args:
            preparing: what is done before the rollout begins; "" once it runs.
            computing: whether the only thing waited for is a device that computes on the cores of this process, so that the CPU
                time of the process shows whether it does.
        """
        self._seconds, self._progress, self._describe = seconds, progress, describe
        self._preparing, self._computing = preparing, computing
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rrl-watchdog", daemon=True)
        self._seen, self._doing, self._used = 0, "", 0.0
        self._since = self._reported = 0.0

    def __enter__(self) -> None:
        if self._seconds:
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _watch(self) -> None:
        self.begin(time.monotonic(), time.process_time())
        while not self._over.wait(self._seconds / CHECKS_PER_REPORT):
            self.check(time.monotonic(), time.process_time())

    def begin(self, now: float, used: float) -> None:
        """Starts the clock, at the second `now`, when the process has used `used` seconds of CPU time."""
        self._seen, self._doing = self._progress(), self._preparing()
        self._since = self._reported = now
        self._used = used

    def check(self, now: float, used: float) -> None:
        """Reports, if nothing has moved for long enough."""
        if self._progress() != self._seen or self._preparing() != self._doing:
            self.begin(now, used)
        elif now - self._reported >= self._seconds:
            self._report(now - self._since, (used - self._used) / (now - self._reported))
            self._reported, self._used = now, used

    def _report(self, waited: float, cores: float) -> None:
        """`cores` is how many the process has used on average since the last report."""
        if self._doing:
            log.info("the rollout has not begun yet; for %.0f s: %s", waited, self._doing)
        elif (
            self._computing()
            and cores >= MIN_COMPUTING_CORES
            and waited < MAX_COMPUTING_REPORTS * self._seconds
        ):
            log.info(
                "the device has been computing for %.0f s, on %.1f cores: %s", waited, cores, self._describe()
            )
        else:
            log.error("the rollout has not moved for %g s: %s", self._seconds, self._describe())
