"""Lines on standard error with the seconds since the start."""

import sys
import time


class TimedLog:
    """Says what is happening, with the seconds since the start."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def __call__(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:5.1f} s] {text}", file=sys.stderr, flush=True)
