"""Everything that an RL run writes: checkpoints, metrics, trajectories for the report, and progress lines."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rrl.files import saving
from rrl.rollout.curriculum import Curriculum
from rrl.runs.checkpoints import Checkpoints
from rrl.runs.metrics import MetricsWriter
from rrl.runs.progress import Progress
from rrl.runs.saved_trajectories import SavedTrajectories
from rrl.setup.rl_config import MAY_DIFFER, MAY_GROW, RLConfig
from rrl.train.dump import dump_batch
from rrl.train.guard import Guard
from rrl.train.learner import Learner, LearningBatch


class RunRecorder:
    """The outputs of a run in its workdir. Opening it restores the learner and the curriculum from the latest checkpoint.

    A run may take several processes, one after another. Each continues from the latest checkpoint.

    Attributes:
      learner, curriculum: as given to the constructor.
      step: completed updates when this process opened the workdir.
      start_metrics: held-out metrics of the initial policy; empty until it is evaluated.
      seconds: training time of all processes of the run, without evaluations.
      writer: metrics of the run.
      progress: progress line of this process.
      guard: checks for collapse. With action="warn" it has already checked the metrics of earlier processes.
      guard_message: the guard's last message about the metrics of earlier processes; "" if there was none.
      saved_trajectories: trajectories for the final report.
    """

    def __init__(
        self,
        config: RLConfig,
        identity: Mapping[str, Any],
        learner: Learner,
        curriculum: Curriculum,
        workdir: str | os.PathLike[str],
    ) -> None:
        """Open the workdir, and restore the learner and the curriculum if it has a checkpoint.

        Raises:
            UserError: the workdir belongs to another config or `identity`.
        """
        self.config = config
        self.start_metrics: dict[str, float] = {}
        self.seconds = 0.0
        self.step = 0
        self.guard, self.guard_message = Guard(config.guard), ""
        self.saved_trajectories = SavedTrajectories(workdir)
        self.learner, self.curriculum = learner, curriculum
        settings = dataclasses.asdict(config) | {"run": dict(identity)}
        with contextlib.ExitStack() as stack:
            self._checkpoints = stack.enter_context(
                Checkpoints(workdir, settings, may_differ=MAY_DIFFER, may_grow=MAY_GROW)
            )
            metrics_lines: int | None = 0
            if self._checkpoints.latest is not None:
                self.step, metrics_lines = self.restore()
            self.writer = stack.enter_context(MetricsWriter(workdir, self.step, metrics_lines))
            if self._checkpoints.latest is None and config.guard.action == "stop":
                self.save(0)  # for a run that collapses before its first regular checkpoint
            self._evaluations = _evaluations(self.writer.past)
            # The evaluations in the lines that `MetricsWriter` removed because they are newer than the checkpoint.
            self._removed_evaluations = _evaluations(self.writer.removed)
            # With "stop" the latest checkpoint is from before any sign of collapse, so the guard starts empty.
            for line in self.writer.past if config.guard.action == "warn" else ():
                self.guard_message = self.guard.check(line["step"], _with_nan(line)) or self.guard_message
            self.progress = stack.enter_context(Progress(config.steps, self.step, "train"))
            self._exit_stack = stack.pop_all()

    def __enter__(self) -> "RunRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit_stack.__exit__(kind, error, trace)

    def check_last_save(self) -> None:
        """Raise SaveError if the last checkpoint, which Orbax saves in the background, could not be saved."""
        self._checkpoints.check()

    def save(self, step: int) -> None:
        """Save a checkpoint after `step` updates.

        With guard.action="stop" nothing is saved while the guard sees a sign of collapse, except after the last step: a
        collapsed run returns to the latest checkpoint.
        """
        if step == self.config.steps or self.config.guard.action != "stop" or not self.guard.sees_collapse:
            metadata = {"before": self.start_metrics, "seconds": self.seconds, "step": step}
            metadata |= {"curriculum": self.curriculum.state, "lines": self.writer.lines}
            self._checkpoints.save(step, self.learner.state, metadata)

    def restore(self) -> tuple[int, int | None]:
        """Restore the latest checkpoint.

        Returns:
            Its step and its number of metrics lines (None if an older version wrote the checkpoint).
        """
        self.learner.state, metadata = self._checkpoints.restore(
            self.learner.state, required_fields=("before", "seconds", "curriculum", "step")
        )
        self.start_metrics, self.seconds = metadata["before"], metadata["seconds"]
        self.curriculum.restore(metadata["curriculum"])
        return int(metadata["step"]), metadata.get("lines")

    def past_evaluation(self, step: int) -> dict[str, float] | None:
        """Return the held-out metrics of a step if this or an earlier process evaluated it; else None.

        A resumed run removes the lines of metrics.jsonl that are newer than its checkpoint. If an evaluation's line was among
        them, this function writes the line again, so that the evaluation is not repeated.
        """
        if step in self._removed_evaluations:
            self._evaluations[step] = self._removed_evaluations.pop(step)
            self.writer.write(step, self._evaluations[step])
        return self._evaluations.get(step)

    def write_evaluation(self, step: int, metrics: dict[str, float], seconds: float) -> dict[str, float]:
        """Write and show the held-out metrics of a step.

        Args:
            step: completed updates.
            metrics: held-out metrics.
            seconds: duration of the evaluation.

        Returns:
            The metrics as written, with times.
        """
        metrics = metrics | {"time/eval": seconds, "minutes": self.seconds / 60 if step else 0.0}
        self.writer.write(step, metrics)
        self._evaluations[step] = metrics
        recall = metrics.get("eval/full_recall")
        recall_text = "" if recall is None else f"full recall {100 * recall:.1f}  "
        self.progress.note(
            f"step {step}: held-out EM {100 * metrics['eval/em']:.1f}  F1 {100 * metrics['eval/f1']:.1f}  {recall_text}"
            f"searches {metrics['eval/searches']:.2f}  ({seconds:.0f} s)"
        )
        return metrics

    def save_non_finite_batch(self, step: int, batch: LearningBatch) -> None:
        """Save the batch of a step whose gradient was not finite, and log it."""
        folder = self._checkpoints.workdir / "not_finite"
        with saving(folder):
            file = dump_batch(folder, step, batch.trajectories, batch.advantages)
        saved = f"; the batch is in {file}" if file else ""
        self.progress.note(f"step {step}: a gradient was not finite, its update is skipped{saved}")


def _evaluations(lines: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the held-out metrics among lines of metrics, by step."""
    return {
        line["step"]: {name: value for name, value in line.items() if name != "step"}
        for line in lines
        if "eval/em" in line
    }


def _with_nan(line: Mapping[str, Any]) -> dict[str, float]:
    """Return a line of metrics with null replaced by NaN: `MetricsWriter` writes values that are not finite as null."""
    return {name: math.nan if value is None else value for name, value in line.items()}
