"""Progress of a run: a bar on a terminal, plain lines in a log file or pipe."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from tqdm import tqdm


class Progress:
    """Shows step, chosen metrics, tokens/s and the estimated time left.

    The estimate ignores the first step, which compiles. On a terminal the progress is a tqdm bar. In a log file or pipe it is
    one line for the first step, then at most one line every `seconds` seconds, and one line at the end.
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
        """Step and time of the first `update`; the estimate starts there."""
        self._bar = (
            tqdm(total=total, initial=start, desc=label, file=self._stream, dynamic_ncols=True)
            if self._stream.isatty()
            else None
        )

    def begin(self) -> None:
        """Restart the clock. Call it when the first step starts."""
        self._began = time.monotonic()
        if self._bar is not None:
            self._bar.unpause()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time within the block from speed and time left."""
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
        self, step: int, metrics: Mapping[str, Any], tokens: int = 0, seconds_left: float | None = None
    ) -> None:
        """Show that `step` updates are done.

        Args:
            step: completed updates.
            metrics: values to show, by name.
            tokens: tokens that were processed since the last call.
            seconds_left: time until the run ends regardless of its steps; None without such a limit.
        """
        advance, self.step = step - self.step, step
        self._tokens += tokens
        now = time.monotonic()
        shown = " ".join(f"{name}={_short(value)}" for name, value in metrics.items())
        if self._tokens:
            shown += f" tok/s={_short(self._tokens / max(1e-9, now - self._began))}"
        if self._bar is not None:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(advance)
        # The last condition holds for the first update of this process.
        elif now - self._last >= self.seconds or step >= self.total or advance == step - self._start:
            self._last = now
            self._line(
                f"{self.label}: {step}/{self.total} {shown} left={self._left(step, now, seconds_left)}"
            )
        if self._first is None:
            self._first = step, now

    def _left(self, step: int, now: float, limit: float | None) -> str:
        if step >= self.total:
            return _clock(0)
        if self._first is None or step <= self._first[0]:
            return "?" if limit is None else _clock(max(0.0, limit))
        first_step, first_time = self._first
        left = (now - first_time) / (step - first_step) * (self.total - step)
        return _clock(left if limit is None else max(0.0, min(left, limit)))

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._line(text)

    def close(self) -> None:
        """Close the bar. Its last state stays on the screen."""
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
