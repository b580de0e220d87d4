"""SIGTERM and Ctrl-C as a wish that is seen at the next safe place, instead of the end of the process."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


class ServiceUnavailable(OSError):
    """A service gave no answer, in spite of all attempts, or because the run is to stop. Asked again later it may."""


class RunStopped(Exception):
    """A signal stopped a run that this process had started, after it had saved. The same command continues."""


class StopSignal:
    """Remembers that SIGTERM or SIGINT came, so that a loop can save and leave at its next step."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __bool__(self) -> bool:
        return self._event.is_set()

    def set(self, *_: object) -> None:
        """Asks for the stop."""
        self._event.set()
        for call in list(_callbacks):
            call()


_callbacks: list[Callable[[], None]] = []


@contextlib.contextmanager
def on_stop(call: Callable[[], None]) -> Iterator[None]:
    """Within the block a stop that is asked for calls this too, from the signal's handler: it must be quick."""
    _callbacks.append(call)
    try:
        yield
    finally:
        _callbacks.remove(call)


@contextlib.contextmanager
def stop_requested() -> Iterator[StopSignal]:
    """Within the block SIGTERM (and the first Ctrl-C) set the flag that is yielded instead of ending the process.

    A second Ctrl-C interrupts at once. Outside the main thread, where signals cannot be caught, the flag stays unset.
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
