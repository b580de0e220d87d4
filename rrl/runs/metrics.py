"""Metrics of a run: `metrics.jsonl` (one line per step) and TensorBoard, consistent across resumes."""

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
"""Prefixes (before the "/") of metrics whose values must be numbers or null."""
_REMEDY = "remove that line, or move the file away: the run continues without it"

log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends the metrics of each step to `workdir/metrics.jsonl` and to TensorBoard.

    A run that resumes from the checkpoint of step S truncates the file to the lines that it had when that checkpoint was
    saved. So the file equals that of an uninterrupted run. The caller must save `lines` with each checkpoint.
    In a run of several processes, which share the workdir and have the same metrics, only the first writes.

    Attributes:
      past: lines of the run before it resumed, which remain in the file; the same in all processes.
      removed: evaluations of steps up to S that were written after the checkpoint of step S was saved, and whose lines are now
        removed; the same in all processes. The run may write these lines again instead of repeating the evaluations.
      lines: number of lines in the file.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        resume_step: int = 0,
        resume_lines: int | None = None,
        tensorboard: bool = True,
    ) -> None:
        """Open the files.

        Args:
          workdir: folder of the run.
          resume_step: S, the number of completed updates; 0 without a checkpoint. Later lines are removed.
          resume_lines: `lines` from the checkpoint; 0 without a checkpoint. None (a checkpoint of an older version) keeps
            all lines up to S. If the file has fewer lines, some were lost and a warning is logged.
          tensorboard: whether to write TensorBoard files too.

        Raises:
          UserError: see `read_metrics`.
        """
        folder = pathlib.Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        existing = _lines_of(path) if path.exists() else []
        # `resume_lines` counts each line once, but a file that was copied or edited may repeat lines.
        unique = list({json.dumps(line): line for line in existing}.values())
        up_to_step = [line for line in unique if line["step"] <= resume_step]
        end = len(up_to_step) if resume_lines is None else resume_lines
        self.past, self.removed = up_to_step[:end], up_to_step[end:]
        self.lines = len(self.past)
        self._file: pathlib.Path | None = None
        self._board: EventFile | None = None
        if jax.process_index() == 0:
            if existing and resume_lines == 0 and resume_step == 0:
                log.warning(
                    "%s holds %d lines of a run without a checkpoint: they are dropped, and training starts from the beginning",
                    path,
                    len(existing),
                )
            _warn_of_lost_lines(path, resume_step, len(self.past), resume_lines)
            # The new file replaces the old one atomically, so that a kill loses no line.
            with saving(path), atomic_stream(path) as stream:
                stream.write("".join(json.dumps(line) + "\n" for line in self.past).encode())
            self._file = path
            if tensorboard:
                with saving(folder / "tensorboard"):
                    self._board = EventFile(folder / "tensorboard", purge_step=resume_step + 1)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a step (the number of completed updates). Values that are not finite become null.

        Raises:
          SaveError: the disk is full, or a file was deleted in the meantime.
        """
        self.lines += 1
        if self._file is None:
            return
        plain = {name: _plain(value) for name, value in metrics.items()}
        # TensorBoard already has the removed lines, since resuming does not remove them from its files.
        if self._board is not None and all(line["step"] != step for line in self.removed):
            scalars = {name: value for name, value in plain.items() if isinstance(value, int | float)}
            with saving(self._board.file):
                self._board.write(step, scalars)
        with saving(self._file):
            append_bytes(self._file, (json.dumps({"step": step} | plain, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Stop writing: later calls of `write` only count lines."""
        self._file = self._board = None

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, sorted by step. An incomplete last line, left by a kill, is skipped.

    Raises:
      UserError: a line is not a JSON object in UTF-8, or a value that must be a number is not. Names file and line.
    """
    return sorted(_lines_of(path), key=lambda line: line["step"])


def refuse_damaged_metrics(workdir: str | os.PathLike[str]) -> None:
    """Check a workdir's metrics file, if it has one. Call it before models are loaded. Raises UserError as `read_metrics`."""
    path = pathlib.Path(workdir) / FILE
    if path.exists():
        _lines_of(path)


def _lines_of(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines in the order of the file. (The initial policy's evaluation, step 0, is written after step 1.)"""
    lines = []
    for number, line in read_json_lines(pathlib.Path(path), _REMEDY):
        if "step" not in line:
            raise UserError(f"{path}, line {number}: the field step is missing; {_REMEDY}")
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


def _warn_of_lost_lines(path: pathlib.Path, step: int, remaining: int, expected: int | None) -> None:
    """Log a warning if lines are missing that the run had written by its checkpoint."""
    # A checkpoint of an older version has no number of lines: at least one line must then be there, unless its step is 0.
    minimum = min(step, 1) if expected is None else expected
    if remaining < minimum:
        present = "none" if not remaining else f"only {remaining}"
        written = "the lines" if expected is None else f"the {expected} lines"
        log.warning(
            "%s holds %s of %s that the run had written by its checkpoint of step %d: the others are lost and missing in "
            "curves and comparisons. The TensorBoard files in %s hold their values",
            path,
            present,
            written,
            step,
            path.parent / "tensorboard",
        )


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | None):
        return value
    value = np.asarray(value).item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
