"""Says what a rollout is waiting for when nothing happens: a hang that tells its place is half mended."""

import logging
import threading
from collections.abc import Callable
from types import TracebackType


class Watchdog:
    """While its block runs: logs `describe()` whenever `progress()` has not changed for `seconds` (0: never)."""

    def __init__(self, seconds: float, progress: Callable[[], int], describe: Callable[[], str]) -> None:
        self._seconds, self._progress, self._describe = seconds, progress, describe
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rrl-watchdog", daemon=True)

    def __enter__(self) -> None:
        if self._seconds:
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _watch(self) -> None:
        seen = self._progress()
        while not self._over.wait(self._seconds):
            if (now := self._progress()) == seen:
                logging.getLogger(__name__).error(
                    "the rollout has not moved for %g s: %s", self._seconds, self._describe()
                )
            seen = now
