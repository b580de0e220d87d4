"""A progress line: a bar on a terminal, a plain line every so often elsewhere."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from tqdm import tqdm


class Progress:
    """Shows step, chosen metrics, tokens/s and time left, which is reckoned from the end of the first step on: that one compiles.

    On a terminal it is one tqdm bar; in a log file or pipe it is a line for the first step, at most one every `seconds`
    after it, and one at the end.
    """

    def __init__(
        self,
        total: int,
        start: int = 0,
        label: str = "train",
        seconds: float = 10.0,
        stream: TextIO | None = None,
    ) -> None:
        self.total, self.step, self.label, self.seconds = total, start, label, seconds
        self._start, self._tokens = start, 0
        self._stream = stream or sys.stderr
        self._began = self._last = time.monotonic()
        self._first: tuple[int, float] | None = None
        """Where the first update ended, and when."""
        self._bar = (
            tqdm(total=total, initial=start, desc=label, file=self._stream, dynamic_ncols=True)
            if self._stream.isatty()
            else None
        )

    def begin(self) -> None:
        """Starts the clock again: what came before belongs to no step."""
        self._began = time.monotonic()
        if self._bar is not None:
            self._bar.unpause()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside counts neither for the speed nor for the time left."""
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began
            self._began += took
            if self._first is not None:
                self._first = self._first[0], self._first[1] + took
            if self._bar is not None:
                self._bar.unpause()

    def update(
        self, step: int, metrics: Mapping[str, Any], tokens: int = 0, seconds: float | None = None
    ) -> None:
        """Tells that `step` updates are done; `tokens` is what the steps since the last call processed. After so many `seconds`
        more the run ends, whatever its steps."""
        advance, self.step = step - self.step, step
        self._tokens += tokens
        now = time.monotonic()
        shown = " ".join(f"{name}={_short(value)}" for name, value in metrics.items())
        if self._tokens:
            shown += f" tok/s={_short(self._tokens / max(1e-9, now - self._began))}"
        if self._bar is not None:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(advance)
        elif now - self._last >= self.seconds or step >= self.total or advance == step - self._start:
            self._last = now
            self._line(f"{self.label}: {step}/{self.total} {shown} left={self._left(step, now, seconds)}")
        if self._first is None:
            self._first = step, now

    def _left(self, step: int, now: float, most: float | None) -> str:
        if step >= self.total:
            return _clock(0)
        if self._first is None or step <= self._first[0]:
            return "?" if most is None else _clock(max(0.0, most))
        done, since = self._first
        left = (now - since) / (step - done) * (self.total - step)
        return _clock(left if most is None else max(0.0, min(left, most)))

    def note(self, text: str) -> None:
        """Prints a line of its own above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._line(text)

    def close(self) -> None:
        """Leaves the last state on the screen."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _short(value: Any) -> str:
    if isinstance(value, str):
        return value
    value = float(value)
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 10_000:
        return f"{value / 1000:.0f}k"
    return f"{value:.0f}" if value == int(value) and abs(value) >= 1 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
