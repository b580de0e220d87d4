"""Stop a run cleanly: SIGTERM and Ctrl-C set a flag, which a loop checks where it can save and end."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


class ServiceUnavailable(OSError):
    """A service did not answer after all retries, or a stop signal cut the retries short. A later request may succeed."""


class RunStopped(Exception):
    """A signal stopped a run that this process waited for. The run has saved its state; the same command continues it."""


class StopSignal:
    """A flag: true after SIGTERM or SIGINT. A loop checks it at each step, saves and ends."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __bool__(self) -> bool:
        return self._event.is_set()

    def set(self, *_: object) -> None:
        """Set the flag and run the callbacks of `on_stop`. Accepts the arguments of a signal handler."""
        self._event.set()
        for callback in list(_callbacks):
            callback()


_callbacks: list[Callable[[], None]] = []


@contextlib.contextmanager
def on_stop(callback: Callable[[], None]) -> Iterator[None]:
    """Within the block, run `callback` when a stop is requested. The signal handler calls it, so it must be quick."""
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)


@contextlib.contextmanager
def stop_requested() -> Iterator[StopSignal]:
    """Catch SIGTERM and Ctrl-C within the block: they set the flag that this context manager yields, and do not end the process.

    A second Ctrl-C interrupts at once. Outside the main thread signals cannot be caught, and the flag stays unset.
    """
    flag = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def interrupt(*_: object) -> None:
        if flag:
            raise KeyboardInterrupt
        flag.set()

    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, flag.set)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
