"""Metrics of a run: `metrics.jsonl` (one line a step) and TensorBoard, consistent across resumes."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter

from rrl.files import write_whole


class MetricsWriter:
    """Appends the metrics of each step to `workdir/metrics.jsonl` and to TensorBoard.

    A run resumed at step S drops what a former life wrote of later steps, so that the file reads as one uninterrupted run.
    Of several processes, which share the workdir and have the same metrics, the first writes.

    Attributes:
      past: the lines up to step S as they were written, in every process.
    """

    def __init__(
        self, workdir: str | os.PathLike[str], resume_step: int = 0, tensorboard: bool = True
    ) -> None:
        """Opens the files; lines of steps after `resume_step` (completed updates) are removed."""
        folder = pathlib.Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        self.past = [line for line in _lines_of(path) if line["step"] <= resume_step] if path.exists() else []
        self._file = self._board = None
        if jax.process_index() == 0:
            # A kill between two writes must not lose the past.
            write_whole(path, "".join(json.dumps(line) + "\n" for line in self.past))
            self._file = path.open("a", encoding="utf-8")
            if tensorboard:
                self._board = SummaryWriter(
                    str(folder / "tensorboard"), purge_step=resume_step + 1, flush_secs=10
                )

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes scalars of a step (the number of completed updates). A value that is not finite is written as null."""
        if self._file is None:
            return
        plain = {name: _plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step} | plain, allow_nan=False) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in plain.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes both."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics file by step; a last line that a kill cut short is ignored."""
    return sorted(_lines_of(path), key=lambda line: line["step"])


def _lines_of(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines as they were written: step 0, the start's evaluation, comes after step 1."""
    lines = []
    for text in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | None):
        return value
    value = np.asarray(value).item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
