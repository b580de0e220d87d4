"""Metrics of a run: `metrics.jsonl` (one line a step) and TensorBoard, consistent across resumes."""

import json
import logging
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rrl.errors import UserError
from rrl.files import append_bytes, atomic_stream, read_json_lines, saving
from rrl.runs.tensorboard import EventFile

FILE = "metrics.jsonl"

NUMERIC_PREFIXES = (
    "reward",
    "train",
    "eval",
    "critic",
    "tokens",
    "ended",
    "cut",
    "rollout",
    "time",
    "memory",
)
"""What stands before the / of a name whose value is a number."""
_REMEDY = "remove that line, or move the file away: a run goes on without them"

log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends the metrics of each step to `workdir/metrics.jsonl` and to TensorBoard.

    A run resumed from the checkpoint of step S goes on behind the lines that the file had when that was saved, so that the
    file reads as one uninterrupted run, line by line. A checkpoint says how many they were: save `lines` with it.
    Of several processes, which share the workdir and have the same metrics, the first writes.

    Attributes:
      past: these lines, in every process.
      repeated: later lines of steps up to S, in every process: evaluations that followed the checkpoint. They are no
        longer in the file; a run that wants to save the work writes them again in their turn.
      lines: how many lines the file has now.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        resume_step: int = 0,
        resume_lines: int | None = None,
        tensorboard: bool = True,
    ) -> None:
        """Opens the files.

        Args:
          workdir: folder of the run.
          resume_step: S, the number of completed updates; 0 where there is no checkpoint. Later lines are removed.
          resume_lines: `lines` as the checkpoint says, 0 without a checkpoint; None (a checkpoint of an older version): all
            lines up to S are past. Fewer lines than that were lost, of which the log warns.
          tensorboard: False leaves TensorBoard out.

        Raises UserError as `read_metrics`.
        """
        folder = pathlib.Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        there = _lines_of(path) if path.exists() else []
        # A line that was copied must not push another out.
        once = list({json.dumps(line): line for line in there}.values())
        known = [line for line in once if line["step"] <= resume_step]
        end = len(known) if resume_lines is None else resume_lines
        self.past, self.repeated = known[:end], known[end:]
        self.lines = len(self.past)
        self._file: pathlib.Path | None = None
        self._board: EventFile | None = None
        if jax.process_index() == 0:
            if there and resume_lines == 0 and resume_step == 0:
                log.warning(
                    "%s holds %d lines of a run, but there is no checkpoint: training begins anew, and they are dropped",
                    path,
                    len(there),
                )
            _warn_of_loss(path, resume_step, len(self.past), resume_lines)
            # A kill between two writes must not lose the past.
            with saving(path), atomic_stream(path) as stream:
                stream.write("".join(json.dumps(line) + "\n" for line in self.past).encode())
            self._file = path
            if tensorboard:
                with saving(folder / "tensorboard"):
                    self._board = EventFile(folder / "tensorboard", purge_step=resume_step + 1)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes scalars of a step (the number of completed updates). A value that is not finite is written as null.

        Raises SaveError where the disk is full, or a file was deleted meanwhile.
        """
        self.lines += 1
        if self._file is None:
            return
        plain = {name: _plain(value) for name, value in metrics.items()}
        # What the file holds TensorBoard holds too, since a life that is resumed does not write its past again.
        if self._board is not None and all(line["step"] != step for line in self.repeated):
            scalars = {name: value for name, value in plain.items() if isinstance(value, int | float)}
            with saving(self._board.file):
                self._board.write(step, scalars)
        with saving(self._file):
            append_bytes(self._file, (json.dumps({"step": step} | plain, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Writes nothing more."""
        self._file = self._board = None

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics file by step; a last line that a kill cut short is ignored.

    Raises UserError that names file and line for a line that is no JSON object in UTF-8, or whose step is no number.
    """
    return sorted(_lines_of(path), key=lambda line: line["step"])


def refuse_damaged_metrics(workdir: str | os.PathLike[str]) -> None:
    """Raises UserError as `read_metrics`, before a run loads what takes long, where the workdir has metrics."""
    path = pathlib.Path(workdir) / FILE
    if path.exists():
        _lines_of(path)


def _lines_of(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines as they were written: step 0, the start's evaluation, comes after step 1."""
    lines = []
    for number, line in read_json_lines(pathlib.Path(path), _REMEDY):
        if "step" not in line:
            raise UserError(f"{path}, line {number}: there is no step; {_REMEDY}")
        step = line["step"]
        if isinstance(step, bool) or not isinstance(step, int | float) or not abs(step) < math.inf:
            raise UserError(f"{path}, line {number}: step={step!r} must be a number; {_REMEDY}")
        for name, value in line.items():
            if not isinstance(value, int | float | None) and name.partition("/")[0] in NUMERIC_PREFIXES:
                raise UserError(
                    f"{path}, line {number}: {name}={value!r} must be a number or null; {_REMEDY}"
                )
        lines.append(line)
    return lines


def _warn_of_loss(path: pathlib.Path, step: int, there: int, expected: int | None) -> None:
    """Logs that lines are gone which the run had written by its checkpoint."""
    least = min(step, 1) if expected is None else expected
    if there < least:
        number = "none" if not there else f"only {there}"
        of = "the lines" if expected is None else f"the {expected} lines"
        log.warning(
            "%s holds %s of %s that the run had written by its checkpoint of step %d: the others are lost, and missing in "
            "curves and comparisons. TensorBoard's files in %s hold their values",
            path,
            number,
            of,
            step,
            path.parent / "tensorboard",
        )


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | None):
        return value
    value = np.asarray(value).item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
