"""Progress lines in log files, and the bar on a terminal."""

import io

from rrl.runs.progress import Progress


class Terminal(io.StringIO):
    """A stream whose `isatty` is true."""

    def isatty(self):
        return True


def test_the_log_file_of_a_short_run_gets_a_first_and_a_last_line():
    stream = io.StringIO()
    with Progress(3, label="sft", seconds=60, stream=stream) as progress:
        for step in range(1, 4):
            progress.update(step, {"loss": 0.5}, tokens=100)
    first, last = stream.getvalue().splitlines()
    assert first.startswith("sft: 1/3 loss=0.5 tok/s=") and last.startswith("sft: 3/3 loss=0.5 tok/s=")


def test_a_log_file_gets_a_line_at_each_interval():
    stream = io.StringIO()
    with Progress(3, seconds=0, stream=stream) as progress:
        for step in range(1, 4):
            progress.update(step, {})
    assert stream.getvalue().count("\n") == 3


def test_the_time_left_excludes_the_first_step_and_pauses(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("rrl.runs.progress.time.monotonic", lambda: clock[0])
    stream = io.StringIO()
    with Progress(10, start=2, seconds=0, stream=stream) as progress:
        for step, seconds in ((3, 100.0), (4, 5.0), (5, 5.0)):
            clock[0] += seconds
            progress.update(step, {})
        with progress.paused():
            clock[0] += 1000
        clock[0] += 5
        progress.update(6, {})
        progress.update(10, {})
    told = [line.split("left=")[1] for line in stream.getvalue().splitlines()]
    assert told == ["?", "0:30", "0:25", "0:20", "0:00"]


def test_values_that_are_not_finite_are_shown():
    stream = io.StringIO()
    with Progress(1, stream=stream) as progress:
        progress.update(1, {"a": float("nan"), "b": float("inf"), "c": -float("inf")})
    assert "a=nan b=inf c=-inf" in stream.getvalue()


def test_a_terminal_gets_a_bar():
    stream = Terminal()
    with Progress(3, stream=stream) as progress:
        progress.update(2, {"loss": 0.25})
        progress.note("hello")
        progress.update(3, {"loss": 0.25})
    assert "loss=0.25" in stream.getvalue() and "hello" in stream.getvalue() and "3/3" in stream.getvalue()
