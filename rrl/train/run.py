"""Everything around the steps of a run: continuing from a checkpoint, signals, logging, evaluation, saving and the final result.

`rrl.train.loop.train` is the algorithm. Read `TrainingRun.steps` and `TrainingRun.end_step` first.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Bool

from rrl.data.trajectory import Trajectory
from rrl.models.hardware import peak_memory
from rrl.recipes.base import Recipe
from rrl.setup.rl_config import RLConfig
from rrl.stopping import ServiceUnavailable, StopSignal, stop_requested
from rrl.train.evaluation import evaluate
from rrl.train.learner import Learner, LearningBatch, UpdateResult
from rrl.train.recorder import RunRecorder
from rrl.train.sample import SampledStep
from rrl.train.step_metrics import step_metrics
from rrl.train.task import Outcome, RunModels, Task

ZERO_REWARD_STEPS = 3
"""Step after which reward components that were always 0 are logged: their weight, tag or judge may be wrong."""
PROGRESS_METRICS = ("em", "full_recall", "searches")
"""Metrics on the progress line, if the recipe has them."""


@contextlib.contextmanager
def open_run(
    config: RLConfig,
    recipe: Recipe,
    task: Task,
    models: RunModels,
    workdir: str | os.PathLike[str],
    identity: Mapping[str, Any],
    before_writing: Callable[[], None],
) -> Iterator["TrainingRun"]:
    """Open a run in its workdir, continuing from its latest checkpoint. The arguments are those of `rrl.train.loop.train`.

    The end of the `with` block evaluates the final policy and writes its parameters to the decoder. If a judge or reader does
    not answer during the steps, the completed steps are saved and ServiceUnavailable is raised; the next process repeats the
    unfinished step. A signal (SIGTERM or Ctrl-C) makes waiting requests to services raise ServiceUnavailable, too. In
    that case the run ends as after any signal, and the error is not raised.
    """
    learner = Learner(config, models.decoder, models.engine.mesh, models.value_model)
    curriculum = recipe.curriculum(task.train, config.questions, config.seed)
    before_writing()
    with stop_requested() as stop, RunRecorder(config, identity, learner, curriculum, workdir) as recorder:
        run = TrainingRun(config, recipe, task, models, recorder, stop)
        run.start()
        try:
            yield run
        except ServiceUnavailable:
            if not run.in_steps:  # before the first step or after the last: nothing to save
                raise
            run.save_completed_steps()
            if not stop:  # the service failed by itself
                raise
        run.finish()
    nnx.update(models.decoder, learner.learned_params)


class TrainingRun:
    """A run in progress: its completed steps, why it stopped, and its outputs.

    Attributes:
      learner: the policy with its optimiser, the reference and the critic.
      curriculum: selects the questions.
      step: completed updates.
      stopped: see `Outcome`; "" while the run continues.
      in_steps: True while `steps` yields; False before the first step and after the last.
    """

    def __init__(
        self,
        config: RLConfig,
        recipe: Recipe,
        task: Task,
        models: RunModels,
        recorder: RunRecorder,
        stop: StopSignal,
    ) -> None:
        self.config, self.recipe, self.task, self.models = config, recipe, task, models
        self.learner, self.curriculum = recorder.learner, recorder.curriculum
        self._recorder, self._stop = recorder, stop
        self.step, self.stopped, self.in_steps = recorder.step, "", False
        self._guard_message = recorder.guard_message
        # Metrics and trajectories of the evaluation after `step` updates; None if there was none.
        self._evaluation: tuple[dict[str, float], list[Trajectory]] | None = None
        self._sampled: list[Trajectory] = []
        self._nonzero_rewards: set[str] = set()
        self._left_out: Bool[np.ndarray, "N"] = np.zeros(0, bool)

    def start(self) -> None:
        """Do the evaluations that an earlier process left undone when it was stopped. Log where the run continues."""
        recorder, step = self._recorder, self.step
        if step and self.task.held_out and not recorder.start_metrics:
            recorder.start_metrics, _ = self._evaluate(0)
        if self._evaluation_is_due():
            self._evaluation = self._evaluate(step)
        if step:
            state = "finished already," if step == self.config.steps else "continues"
            recorder.progress.note(f"{state} after step {step} of {self.config.steps}")
        recorder.progress.begin()

    def steps(self) -> Iterator[int]:
        """Yield the number of each remaining step, from 0, until all are done, a signal arrives or the guard sees a collapse.

        Each step must end with `end_step`.
        """
        self._curriculum_state = self.curriculum.state
        self.in_steps = True
        while self.step < self.config.steps and not self.stopped:
            if self._stop:  # the signal came during an evaluation
                self.stopped = "signal"
                self._recorder.save(self.step)
                break
            self._step_began = time.perf_counter()
            yield self.step
        self.in_steps = False

    def end_step(self, sampled: SampledStep, batch: LearningBatch, result: UpdateResult) -> None:
        """Log a completed step, then check for collapse, evaluate and save if due."""
        recorder, config = self._recorder, self.config
        seconds = time.perf_counter() - self._step_began
        recorder.seconds += seconds
        self.step, self._curriculum_state = self.step + 1, self.curriculum.state
        self._sampled, self._left_out = sampled.trajectories, batch.left_out
        metrics = step_metrics(sampled, batch, result) | peak_memory()
        metrics |= {
            "time/update": seconds - sampled.seconds,
            "time/step": seconds,
            "minutes": recorder.seconds / 60,
        }
        self._note_missing_update(batch, result)
        self._note_zero_rewards()
        self._update_progress(metrics)
        if self.step == config.steps:
            recorder.saved_trajectories.save_sampled(self.step, self._sampled, self._left_out)
        recorder.check_last_save()
        recorder.writer.write(self.step, metrics)
        # The initial policy is evaluated only now, so that users see the first update sooner.
        if self.task.held_out and not recorder.start_metrics and not self._stop:
            with recorder.progress.paused():
                recorder.start_metrics, _ = self._evaluate(0)
        self._evaluation = None
        if message := recorder.guard.check(self.step, metrics):
            self._guard_message = message
            recorder.progress.note(f"step {self.step}: collapsed? {message}")
            if config.guard.action == "stop":
                self.stopped = "collapse"
                return
        if self._stop:
            self.stopped = "signal" if self.step < config.steps else "done"
            recorder.save(self.step)
            return
        if self._evaluation_is_due():
            with recorder.progress.paused():
                self._evaluation = self._evaluate(self.step)
        if self.step % config.checkpoint_every == 0 or self.step == config.steps:
            recorder.save(self.step)

    def save_completed_steps(self) -> None:
        """Save a checkpoint without the unfinished step, and end the run as after a signal."""
        self.curriculum.restore(self._curriculum_state)
        self._recorder.save(self.step)
        self.stopped, self.in_steps = "signal", False

    def finish(self) -> None:
        """Return to the latest checkpoint after a collapse, and evaluate the final policy unless a signal stopped the run."""
        recorder = self._recorder
        self.stopped = self.stopped or "done"
        if self.stopped == "collapse":
            self.step, _ = recorder.restore()
            recorder.progress.note(f"ended at the last good checkpoint, of step {self.step}")
        if self.stopped != "signal" and self.task.held_out:
            if self.step and not recorder.start_metrics:
                recorder.start_metrics, _ = self._evaluate(0)
            self._evaluation = self._evaluate(self.step)
            # Without a completed step the final policy is the initial one.
            recorder.start_metrics = recorder.start_metrics or self._evaluation[0]
        if not self._sampled and self.step == self.config.steps:
            self._sampled, self._left_out = recorder.saved_trajectories.load_sampled(self.step)

    def outcome(self) -> Outcome:
        """Return how the run ended."""
        final_metrics, evaluated = self._evaluation or ({}, [])
        return Outcome(
            step=self.step,
            stopped=self.stopped,
            start_metrics=self._recorder.start_metrics,
            final_metrics=final_metrics,
            seconds=self._recorder.seconds,
            last_trajectories=self._sampled,
            left_out=self._left_out,
            eval_trajectories=evaluated,
            guard_message=self._guard_message,
        )

    def _evaluate(self, step: int) -> tuple[dict[str, float], list[Trajectory]]:
        """Evaluate the reference (step 0) or the policy after `step` updates, unless that is already done."""
        recorder, config = self._recorder, self.config
        if past_metrics := recorder.past_evaluation(step):
            return past_metrics, recorder.saved_trajectories.load_evaluated(step)
        began = time.perf_counter()
        recorder.progress.note(f"step {step}: evaluating on {len(self.task.held_out)} held-out questions ...")
        metrics, trajectories = evaluate(
            self.models.engine,
            self.learner.learned_params if step else self.learner.reference_params,
            self.recipe,
            self.task.held_out,
            temperature=config.eval_temperature,
            retriever=self.task.held_out_retriever,
            scoring=self.models.scoring.at_step(step, config.steps),
        )
        recorder.saved_trajectories.save_evaluated(step, trajectories)
        return recorder.write_evaluation(step, metrics, time.perf_counter() - began), trajectories

    def _evaluation_is_due(self) -> bool:
        """Return whether `eval_every` asks for an evaluation after `step` updates.

        False at the start and the end of the run, which are evaluated in any case.
        """
        every, step = self.config.eval_every, self.step
        return bool(self.task.held_out and every and step % every == 0 and 0 < step < self.config.steps)

    def _note_missing_update(self, batch: LearningBatch, result: UpdateResult) -> None:
        """Log why a step made no update, or skipped a part of it."""
        note, step = self._recorder.progress.note, self.step
        if not result.finite:
            self._recorder.save_non_finite_batch(step, batch)
        elif not batch.trajectories and not batch.left_out.all():
            # Groups were selected, but have no policy token.
            note(f"step {step}: no update: logits were not finite, so that no token was sampled")
        elif not batch.trajectories:
            note(
                f"step {step}: no update: in every group the rewards differ by at most "
                f"objective.drop_spread={self.config.drop_spread}, or the recipe excludes the group"
            )

    def _note_zero_rewards(self) -> None:
        """Log, after the first steps of a run, each reward component that was 0 for every trajectory so far."""
        for trajectory in self._sampled:
            self._nonzero_rewards.update(name for name, reward in trajectory.rewards.items() if reward)
        # A process that continues a run has not seen the rewards of the steps before.
        if self.step == ZERO_REWARD_STEPS and not self._recorder.step:
            for name in sorted(self._sampled[0].rewards.keys() - self._nonzero_rewards):
                self._recorder.progress.note(
                    f"step {self.step}: the reward component {name!r} was 0 for every trajectory so far"
                )

    def _update_progress(self, metrics: Mapping[str, float]) -> None:
        """Show a completed step on the progress line."""
        values = {"reward": metrics["reward/total"]}
        values |= {name: metrics[f"train/{name}"] for name in PROGRESS_METRICS if f"train/{name}" in metrics}
        tokens = int(sum(t.policy_tokens for t in self._sampled))
        self._recorder.progress.update(self.step, values, tokens)
