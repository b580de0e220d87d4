"""Log lines on standard error, each with the seconds since the start."""

import sys
import time


class TimedLog:
    """A callable that prints a line with the seconds since this object was created.

    Attributes:
        began: `time.perf_counter()` at creation.
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def __call__(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:5.1f} s] {text}", file=sys.stderr, flush=True)
