"""What a run of reinforcement learning keeps in its workdir, and says on its way."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rrl.data.trajectory import Trajectory
from rrl.files import saving
from rrl.rollout.curriculum import Curriculum
from rrl.runs.checkpoints import Checkpoints
from rrl.runs.metrics import MetricsWriter
from rrl.runs.progress import Progress
from rrl.runs.saved_trajectories import SavedTrajectories
from rrl.train.dump import dump_batch
from rrl.train.guard import Guard
from rrl.train.learner import Learner, LearnResult
from rrl.train.rl_config import MAY_DIFFER, MAY_GROW, RLConfig


class RunRecorder:
    """The workdir of a run, opened where the last life of the run left it, with what the learner had learned by then.

    Attributes:
      step: updates that were done when it was opened.
      start_metrics: the held-out metrics of the start, where it has been evaluated.
      seconds: training time of all lives, without evaluations.
      writer, progress, guard: of this life; a guard that warns has seen the metrics of the former ones.
      guard_message: what the guard saw last in those.
      saved: trajectories for the closing report.
    """

    def __init__(
        self,
        config: RLConfig,
        identity: Mapping[str, Any],
        learner: Learner,
        curriculum: Curriculum,
        workdir: str | os.PathLike[str],
    ) -> None:
        """Restores the learner and the curriculum. Raises UserError when the workdir belongs to another config or `identity`."""
        self.config = config
        self.start_metrics: dict[str, float] = {}
        self.seconds = 0.0
        self.step = 0
        self.guard, self.guard_message = Guard(config.guard), ""
        self.saved = SavedTrajectories(workdir)
        self._learner, self._curriculum = learner, curriculum
        settings = dataclasses.asdict(config) | {"run": dict(identity)}
        with contextlib.ExitStack() as stack:
            self._checkpoints = stack.enter_context(Checkpoints(workdir, settings, 2, MAY_DIFFER, MAY_GROW))
            lines: int | None = 0
            if self._checkpoints.latest is not None:
                self.step, lines = self.restore()
            self.writer = stack.enter_context(MetricsWriter(workdir, self.step, lines))
            if self._checkpoints.latest is None and config.guard.action == "stop":
                self.save(0)  # what a run goes back to that collapses before its first checkpoint
            self._evaluations = _evaluations(self.writer.past)
            self._repeated = _evaluations(self.writer.repeated)
            # With "stop" nothing is saved while a sign of collapse shows: the guard begins anew.
            for line in self.writer.past if config.guard.action == "warn" else ():
                self.guard_message = self.guard.check(line["step"], _with_nan(line)) or self.guard_message
            self.progress = stack.enter_context(Progress(config.steps, self.step, "train"))
            self._open = stack.pop_all()

    def __enter__(self) -> "RunRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def check(self) -> None:
        """Raises SaveError if the last checkpoint could not be saved, which Orbax finds in the background."""
        self._checkpoints.check()

    def save(self, step: int) -> None:
        """Keeps what there is: but not while a collapse shows that would end the run, which then goes back."""
        if step == self.config.steps or self.config.guard.action != "stop" or not self.guard.sees_collapse:
            about = {"before": self.start_metrics, "seconds": self.seconds, "step": step}
            about |= {"curriculum": self._curriculum.state, "lines": self.writer.lines}
            self._checkpoints.save(step, self._learner.state, about)

    def restore(self) -> tuple[int, int | None]:
        """Goes back to the last checkpoint; returns its step, and how many lines of metrics there were (None: it is of a
        version that did not say)."""
        self._learner.state, about = self._checkpoints.restore(
            self._learner.state, fields=("before", "seconds", "curriculum", "step")
        )
        self.start_metrics, self.seconds = about["before"], about["seconds"]
        self._curriculum.restore(about["curriculum"])
        return int(about["step"]), about.get("lines")

    def past_evaluation(self, step: int) -> dict[str, float] | None:
        """The held-out metrics of a step that has been evaluated, in whatever life; its line is written if it followed the
        checkpoint that this life started from."""
        if step in self._repeated:
            self._evaluations[step] = self._repeated.pop(step)
            self.writer.write(step, self._evaluations[step])
        return self._evaluations.get(step)

    def write_evaluation(self, step: int, metrics: dict[str, float], seconds: float) -> dict[str, float]:
        """Writes down the held-out metrics of a step, which took so long to find; returns what is written."""
        metrics = metrics | {"time/eval": seconds, "minutes": self.seconds / 60 if step else 0.0}
        self.writer.write(step, metrics)
        self._evaluations[step] = metrics
        recall = metrics.get("eval/full_recall")
        found = "" if recall is None else f"full recall {100 * recall:.1f}  "
        self.progress.note(
            f"step {step}: held-out EM {100 * metrics['eval/em']:.1f}  F1 {100 * metrics['eval/f1']:.1f}  {found}"
            f"searches {metrics['eval/searches']:.2f}  ({seconds:.0f} s)"
        )
        return metrics

    def save_non_finite_batch(self, step: int, trajectories: list[Trajectory], result: LearnResult) -> None:
        """Keeps what a gradient that was not finite was to be learned from, for study."""
        folder = self._checkpoints.workdir / "not_finite"
        with saving(folder):
            file = dump_batch(folder, step, trajectories, result.advantages)
        kept = f"; the batch is in {file}" if file else ""
        self.progress.note(f"step {step}: a gradient was not finite, its update is left out{kept}")


def _evaluations(lines: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Held-out metrics among lines of metrics, by step."""
    return {
        line["step"]: {name: value for name, value in line.items() if name != "step"}
        for line in lines
        if "eval/em" in line
    }


def _with_nan(line: Mapping[str, Any]) -> dict[str, float]:
    """A line of metrics as the step had it: null was not finite."""
    return {name: math.nan if value is None else value for name, value in line.items()}
