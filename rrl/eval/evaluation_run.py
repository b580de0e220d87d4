"""Finished evaluations, read from their folders.

Read `EvaluationRun` and `load_run` first.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from rrl.data.questions import Question, load_questions
from rrl.data.trajectory import Trajectory
from rrl.data.trajectory_files import load_trajectories
from rrl.errors import UserError
from rrl.eval.result_card import ResultCard, card_from_json
from rrl.text.spans import Tag


@dataclasses.dataclass(frozen=True)
class EvaluationRun:
    """One finished evaluation, read from its folder."""

    name: str
    folder: Path
    card: ResultCard
    report: Mapping[str, Any]
    """metrics.json (see `rrl.eval.score_report.report`)."""
    metrics: Mapping[str, Float[np.ndarray, "Q"]]
    """One value per question."""
    ids: Sequence[str]
    """Ids of the questions, in the same order."""
    retrieval_metrics: Mapping[str, Float[np.ndarray, "Q"]] = dataclasses.field(default_factory=dict)
    """recall, full_recall, map, hits and mrr; NaN for questions without gold passages, empty if no question has any."""

    @property
    def main_metric(self) -> str:
        """The metric that counts an answer as right or wrong."""
        return "acc" if "acc" in self.metrics else "em"

    @property
    def tags(self) -> dict[Tag, str]:
        """Tags of the policy's text, as in `Recipe.tags`."""
        pairs = self.report.get("tags", [])
        return {tuple(tag) if isinstance(tag, list) else tag: kind for tag, kind in pairs}

    @property
    def training_metrics(self) -> Path | None:
        """metrics.jsonl of the policy's training run, or None if the policy is not in that run's workdir."""
        file = Path(self.card.model).parent / "metrics.jsonl"
        return file if file.is_file() else None

    @property
    def has_trajectories(self) -> bool:
        """Whether the folder has questions and trajectories. A folder that launch/score.py wrote has neither."""
        return (self.folder / "questions.jsonl").is_file() and (self.folder / "results.jsonl").is_file()

    def questions(self) -> list[Question]:
        """Return the questions, in the order of `metrics`."""
        return load_questions(self.folder / "questions.jsonl")

    def trajectories(self, ids: Sequence[str]) -> dict[str, Trajectory]:
        """Return the trajectories of some questions by id, with their scores as metrics. Raises UserError if one is missing."""
        position = {question.id: at for at, question in enumerate(self.questions())}
        by_id = {}
        for trajectory in load_trajectories(self.folder / "results.jsonl"):
            question_id = trajectory.question.id
            if question_id in ids:
                values = {name: float(column[position[question_id]]) for name, column in self.metrics.items()}
                trajectory.metrics = values | {"em": values[self.main_metric]}
                by_id[question_id] = trajectory
        if missing := [question_id for question_id in ids if question_id not in by_id]:
            raise UserError(
                f"run {self.folder}: results.jsonl has no answer to the question {missing[0]!r}; run its command again, which "
                "answers the missing questions"
            )
        return by_id


def load_run(folder: str | Path, name: str = "") -> EvaluationRun:
    """Read the folder of `rrl.eval.evaluate.run`, or of launch/score.py with a card.

    Raises UserError if the folder is not an evaluation, is not finished, is damaged, or has no card.
    """
    folder = Path(folder)
    if not (folder / "metrics.json").is_file():
        if (folder / "results.jsonl").is_file():
            done = (folder / "results.jsonl").read_bytes().count(b"\n")
            raise UserError(
                f"run {folder}: not finished ({done} questions are answered); run its command again to continue it"
            )
        raise UserError(
            f"run {folder}: not an evaluation (it has no metrics.json); give a folder of launch/eval.py"
        )
    try:
        report = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
        metrics = {name: np.array([line[name] for line in lines]) for name in report["metrics"]}
        ids = [str(line["id"]) for line in lines]
        retrieval_metrics = {
            name: np.array([line[name] for line in lines], np.float64)
            for name in report.get("retrieval_intervals", {})
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"run {folder}: its metrics.json or scores.jsonl is damaged ({error!r}); run its command again, which writes both"
        ) from error
    if "card" not in report:
        raise UserError(
            f"run {folder}: its metrics.json has no result card; launch/eval.py writes one, and launch/score.py does with --card"
        )
    try:
        card = card_from_json(report["card"])
    except UserError as error:
        raise UserError(f"run {folder}: metrics.json, card: {error}") from error
    if len(lines) != card.questions:
        raise UserError(
            f"run {folder}: scores.jsonl has {len(lines)} lines for {card.questions} questions; run its command again, which "
            "writes it"
        )
    return EvaluationRun(
        name or folder.name.removeprefix("eval-"), folder, card, report, metrics, ids, retrieval_metrics
    )


def load_runs(folders: Sequence[str | Path]) -> list[EvaluationRun]:
    """Read several runs. Runs whose folders have the same name are named by their paths.

    Raises UserError for no folder, a folder that is given twice, and as `load_run` does.
    """
    paths = [Path(folder).resolve() for folder in folders]
    if not paths:
        raise UserError("no run: give the folder of one evaluation or more")
    if repeated := [str(path) for path in paths if paths.count(path) > 1]:
        raise UserError(f"run {repeated[0]} is given twice; give each once")
    names = [path.name for path in paths]
    ambiguous = {name for name in names if names.count(name) > 1}
    return [load_run(given, str(given) if name in ambiguous else "") for given, name in zip(folders, names)]
