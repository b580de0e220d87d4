"""Saves the trajectories that the final report shows, so that a killed run can still write its report.

The report shows trajectories of the last evaluation and of the last training step. A run that is killed while it writes the
report cannot sample them again. So the trajectories of an evaluation are saved before its line of metrics is
written, and those of the last step before the last checkpoint.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import Search, Trajectory
from rrl.errors import UserError
from rrl.files import atomic_stream, read_json_lines, saving

MAX_PER_SOURCE = 30
"""Trajectories of each source (evaluation, training) on the report's page. Only these are saved with their tokens; others are
saved as text, as in trajectories.jsonl."""
FOLDER = "report"
"""Folder of a workdir with the saved trajectories."""
EVALUATED, SAMPLED = "evaluated", "sampled"
"""Names of the two files in `FOLDER`, without ".jsonl". The first line of a file is a header with the step."""
_QUESTION_FIELDS = {field.name for field in dataclasses.fields(Question)}
_ARRAYS = ("tokens", "roles", "logps", "sampled_logps", "turns")
_REMEDY = "remove that file: trajectories.html is then written without its trajectories"


class SavedTrajectories:
    """The folder `report` of a workdir. In a run of several processes only the first writes."""

    def __init__(self, workdir: str | os.PathLike[str]) -> None:
        self._folder = pathlib.Path(workdir) / FOLDER

    def save_evaluated(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Save the trajectories of the evaluation after `step` updates."""
        self._save(EVALUATED, {"step": step}, trajectories)

    def save_sampled(
        self, step: int, trajectories: Sequence[Trajectory], left_out: Bool[np.ndarray, "N"]
    ) -> None:
        """Save the trajectories of the last training step.

        Args:
            step: completed updates, including this step's.
            trajectories: N trajectories; only the first `MAX_PER_SOURCE` are saved.
            left_out: [N] true for those that the update did not learn from.
        """
        header = {"step": step, "left_out": left_out[:MAX_PER_SOURCE].tolist()}
        self._save(SAMPLED, header, trajectories[:MAX_PER_SOURCE])

    def load_evaluated(self, step: int) -> list[Trajectory]:
        """Return the trajectories that `save_evaluated` saved for this step; an empty list if there are none."""
        return self._load(EVALUATED, step)[1]

    def load_sampled(self, step: int) -> tuple[list[Trajectory], Bool[np.ndarray, "N"]]:
        """Return the trajectories and `left_out` that `save_sampled` saved for this step; both empty if there are none."""
        header, trajectories = self._load(SAMPLED, step)
        return trajectories, np.array(header.get("left_out", []), bool)

    def _save(self, name: str, header: dict[str, Any], trajectories: Sequence[Trajectory]) -> None:
        if jax.process_index() != 0:
            return
        records = [
            header,
            *(as_json(t, tokens=index < MAX_PER_SOURCE) for index, t in enumerate(trajectories)),
        ]
        file = self._folder / f"{name}.jsonl"
        with saving(file):
            self._folder.mkdir(parents=True, exist_ok=True)
            with atomic_stream(file) as stream:
                stream.writelines(json.dumps(record, default=_scalar).encode() + b"\n" for record in records)

    def _load(self, name: str, step: int) -> tuple[dict[str, Any], list[Trajectory]]:
        file = self._folder / f"{name}.jsonl"
        if not file.is_file():
            return {}, []
        header, *records = [record for _, record in read_json_lines(file, _REMEDY)] or [{}]
        if header.get("step") != step:
            return {}, []
        try:
            return header, [from_json(record) for record in records]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{file}: not a trajectory ({error!r}); {_REMEDY}") from error


def as_json(trajectory: Trajectory, tokens: bool = True) -> dict[str, Any]:
    """Return all fields of a trajectory as JSON values. Without `tokens` the arrays and the passages are empty;
    `Search.titles` and `Search.ids` remain."""
    record = dataclasses.asdict(trajectory)
    for name in _ARRAYS:
        array = np.asarray(record[name]) if tokens else np.zeros(0, record[name].dtype)
        record[name] = {"dtype": array.dtype.name, "values": array.tolist()}
    if not tokens:
        for search in record["searches"]:
            search["passages"] = ()
    return record


def from_json(record: dict[str, Any]) -> Trajectory:
    """Return the trajectory that `as_json` converted. Questions of a subclass (R2AG's curriculum) become a plain `Question`."""
    arrays = {name: np.array(record[name]["values"], record[name]["dtype"]) for name in _ARRAYS}
    turn_rewards = record["turn_rewards"]
    converted: dict[str, Any] = {
        "question": Question(
            **{n: v for n, v in _tuples(record["question"]).items() if n in _QUESTION_FIELDS}
        ),
        "segments": [tuple(segment) for segment in record["segments"]],
        "searches": [
            Search(**_tuples(search) | {"passages": tuple(Passage(**p) for p in search["passages"])})
            for search in record["searches"]
        ],
        "starts": tuple(record["starts"]),
        "cuts": tuple(tuple(cut) for cut in record["cuts"]),
        "turn_rewards": turn_rewards and {int(turn): reward for turn, reward in turn_rewards.items()},
    }
    return Trajectory(**record | arrays | converted)


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _scalar(value: Any) -> Any:
    """Convert a NumPy scalar for JSON."""
    return value.item()
