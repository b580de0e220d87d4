"""What a run of reinforcement learning keeps in its workdir, and says on its way."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from rrl.rollout.curriculum import Curriculum
from rrl.rollout.trajectory import Trajectory
from rrl.train.checkpoints import Checkpoints
from rrl.train.dump import dump_batch
from rrl.train.guard import Guard
from rrl.train.learner import Learner, Lesson
from rrl.train.metrics import MetricsWriter
from rrl.train.progress import Progress
from rrl.train.rl_config import MAY_DIFFER, RLConfig


class Record:
    """The workdir of a run, opened where the last life of the run left it, with what the learner had learned by then.

    Attributes:
      step: updates that were done when it was opened.
      before: the held-out metrics of the start, where it has been evaluated.
      seconds: training time of all lives, without evaluations.
      evaluations: held-out metrics by step.
      writer, progress, guard: of this life.
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
        self.before: dict[str, float] = {}
        self.seconds = 0.0
        self.step = 0
        self.guard = Guard(config.guard)
        self._learner, self._curriculum = learner, curriculum
        settings = dataclasses.asdict(config) | {"run": dict(identity)}
        with contextlib.ExitStack() as stack:
            self._checkpoints = stack.enter_context(Checkpoints(workdir, settings, may_differ=MAY_DIFFER))
            if self._checkpoints.latest is not None:
                self.step = self.restore()
            elif config.guard.action == "stop":
                self.save(0)  # what a run goes back to that collapses before its first checkpoint
            self.writer = stack.enter_context(MetricsWriter(workdir, self.step))
            self.evaluations = {line["step"]: line for line in self.writer.past if "eval/em" in line}
            self.progress = stack.enter_context(Progress(config.steps, self.step, "train"))
            self._open = stack.pop_all()

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def save(self, step: int) -> None:
        """Keeps what there is: but not while a collapse shows that would end the run, which then goes back."""
        if step == self.config.steps or self.config.guard.action != "stop" or not self.guard.suspects:
            about = {"before": self.before, "seconds": self.seconds, "step": step}
            about |= {"curriculum": self._curriculum.state}
            self._checkpoints.save(step, self._learner.state, about)

    def restore(self) -> int:
        """Goes back to the last checkpoint; returns its step."""
        self._learner.state, about = self._checkpoints.restore(self._learner.state)
        self.before, self.seconds = about["before"], about["seconds"]
        self._curriculum.restore(about["curriculum"])
        return int(about["step"])

    def evaluated(self, step: int, metrics: dict[str, float], seconds: float) -> dict[str, float]:
        """Writes down the held-out metrics of a step, which took so long to find; returns what is written."""
        metrics = metrics | {"time/eval": seconds, "minutes": self.seconds / 60 if step else 0.0}
        self.writer.write(step, metrics)
        self.evaluations[step] = {"step": step} | metrics
        recall = metrics.get("eval/full_recall")
        found = "" if recall is None else f"full recall {100 * recall:.1f}  "
        self.progress.note(
            f"step {step}: held-out EM {100 * metrics['eval/em']:.1f}  F1 {100 * metrics['eval/f1']:.1f}  {found}"
            f"searches {metrics['eval/searches']:.2f}  ({seconds:.0f} s)"
        )
        return metrics

    def not_finite(self, step: int, trajectories: list[Trajectory], lesson: Lesson) -> None:
        """Keeps what a gradient that was not finite was to be learned from, for study."""
        file = dump_batch(self._checkpoints.workdir / "not_finite", step, trajectories, lesson.credit)
        kept = f"; the batch is in {file}" if file else ""
        self.progress.note(f"step {step}: a gradient was not finite, its update is left out{kept}")
