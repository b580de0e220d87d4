"""The reinforcement-learning loop: sample and score episodes, compute advantages, update, log, evaluate and save.

Read `train` first.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Bool

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.models.decoder import Decoder
from rrl.models.hardware import peak_memory
from rrl.models.heads import ValueModel
from rrl.recipes.base import NO_MODELS, Recipe, ScoringContext, curriculum_of
from rrl.retrieval.retriever import Retriever
from rrl.rl.advantages import low_spread
from rrl.rollout.engine import Engine
from rrl.stopping import ServiceUnavailable, stop_requested
from rrl.train.learner import Learner
from rrl.train.recorder import RunRecorder
from rrl.train.rl_config import RLConfig
from rrl.train.sample import SampledStep, evaluate, sample_step, trajectory_metrics

PROGRESS_METRICS = ("em", "full_recall", "searches")
"""Metrics on the progress line, if the recipe has them."""


@dataclasses.dataclass(frozen=True)
class Task:
    """The questions of a run, for training and for evaluation."""

    train: Sequence[Question]
    held_out: Sequence[Question]
    held_out_retriever: Retriever | None = None
    """Retriever over the corpus of the held-out questions; None: the engine's retriever."""


@dataclasses.dataclass
class Outcome:
    """How a run ended."""

    step: int
    """Completed updates."""
    stopped: str
    """Reason of the end: done, signal or collapse."""
    start_metrics: dict[str, float]
    """Held-out metrics of the initial policy."""
    final_metrics: dict[str, float]
    """Held-out metrics of the final policy."""
    seconds: float
    """Training time of all processes of the run, without evaluations."""
    last_trajectories: list[Trajectory]
    """The N trajectories of the last training step. If an earlier process finished the run, only those that
    `SavedTrajectories` saved for the report."""
    left_out: Bool[np.ndarray, "N"]
    """True for the trajectories of the last step that its update did not use."""
    eval_trajectories: list[Trajectory]
    """Trajectories of the last evaluation. If an earlier process did it, they are loaded from `SavedTrajectories`."""
    guard_message: str = ""
    """The guard's last message; "" if there was none."""


def train(
    config: RLConfig,
    recipe: Recipe,
    task: Task,
    engine: Engine,
    decoder: Decoder,
    workdir: str | os.PathLike[str],
    *,
    scoring: ScoringContext = NO_MODELS,
    identity: Mapping[str, Any] | None = None,
    value_model: ValueModel | None = None,
    before_writing: Callable[[], None] = lambda: None,
) -> Outcome:
    """Train `decoder` in place. If the workdir has a checkpoint, continue from it.

    Args:
        config: settings of the run.
        recipe: prompt, environment, rewards and advantages.
        task: training and held-out questions.
        engine: samples episodes.
        decoder: initial policy, and the frozen reference. It ends with the final policy's parameters: with
            `config.average_last` the mean over the last updates.
        workdir: gets config.json, checkpoints, metrics and trajectories for the report.
        scoring: models that the rewards use.
        identity: what identifies the run besides `config` (models, data). Another identity in the workdir is refused.
        value_model: initial critic, with `config.critic`.
        before_writing: called after all settings and questions are checked, before anything is written.

    Raises:
        UserError: the workdir belongs to another config.
        SaveError: the workdir cannot be written.
        ServiceUnavailable: a judge or reader does not answer. A checkpoint is saved first.
    """
    learner = Learner(config, decoder, engine.mesh, value_model)
    curriculum = curriculum_of(recipe, task.train, config.questions, config.seed)
    before_writing()

    def evaluate_policy(step: int) -> tuple[dict[str, float], list[Trajectory]]:
        """Evaluate the reference (step 0) or the policy after `step` updates, unless that is already done."""
        if known := recorder.past_evaluation(step):
            return known, recorder.saved.load_evaluated(step)
        began = time.perf_counter()
        recorder.progress.note(f"step {step}: evaluating on {len(task.held_out)} held-out questions ...")
        metrics, trajectories = evaluate(
            engine,
            learner.learned_params if step else learner.reference_params,
            recipe,
            task.held_out,
            temperature=config.eval_temperature,
            retriever=task.held_out_retriever,
            scoring=scoring.at_step(step, config.steps),
        )
        recorder.saved.save_evaluated(step, trajectories)
        return recorder.write_evaluation(step, metrics, time.perf_counter() - began), trajectories

    def evaluation_is_due(step: int) -> bool:
        """Return whether the policy is evaluated after `step` updates, during training."""
        due = config.eval_every and step % config.eval_every == 0 and 0 < step < config.steps
        return bool(task.held_out and due)

    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_requested())
        recorder = stack.enter_context(RunRecorder(config, identity or {}, learner, curriculum, workdir))
        step, stopped, reason, sampled = recorder.step, "done", recorder.guard_message, SampledStep()
        # An earlier process may have been stopped before its evaluations.
        if step and task.held_out and not recorder.start_metrics:
            recorder.start_metrics, _ = evaluate_policy(0)
        last = evaluate_policy(step) if evaluation_is_due(step) else None
        if step:
            words = "finished already," if step == config.steps else "continues"
            recorder.progress.note(f"{words} after step {step} of {config.steps}")
        recorder.progress.begin()
        curriculum_state = curriculum.state
        try:
            while step < config.steps:
                if stop:  # the signal came during an evaluation
                    stopped = "signal"
                    recorder.save(step)
                    break
                began = time.perf_counter()
                sampled = sample_step(
                    config, step, engine, learner.policy_params, recipe, curriculum, scoring
                )
                rolled = time.perf_counter()
                metrics = trajectory_metrics(sampled.trajectories, "train")
                metrics |= _learn(config, step, sampled, recipe, learner, recorder)
                step, curriculum_state = step + 1, curriculum.state
                learner.update_average(step)
                done = time.perf_counter()
                recorder.seconds += done - began
                metrics |= {
                    "rollout/busy": sampled.stats.busy,
                    "rollout/tokens_per_step": sampled.stats.tokens_per_step,
                    "rollout/tokens_per_second": sampled.stats.tokens_per_second,
                    "time/rollout": sampled.stats.seconds,
                    "time/retrieval": sampled.stats.retrieval_seconds,
                    "time/score": rolled - began - sampled.stats.seconds,
                    "time/update": done - rolled,
                    "time/step": done - began,
                    "minutes": recorder.seconds / 60,
                } | peak_memory()
                _update_progress(step, metrics, sampled, recorder)
                if step == config.steps:
                    recorder.saved.save_sampled(step, sampled.trajectories, sampled.left_out)
                recorder.check()
                recorder.writer.write(step, metrics)
                # The initial policy is evaluated after the first update, since users wait for the first update.
                if task.held_out and not recorder.start_metrics and not stop:
                    with recorder.progress.paused():
                        recorder.start_metrics, _ = evaluate_policy(0)
                last = None
                if message := recorder.guard.check(step, metrics):
                    reason = message
                    recorder.progress.note(f"step {step}: collapsed? {reason}")
                    if config.guard.action == "stop":
                        stopped = "collapse"
                        break
                if stop:
                    stopped = "signal" if step < config.steps else "done"
                    recorder.save(step)
                    break
                if evaluation_is_due(step):
                    with recorder.progress.paused():
                        last = evaluate_policy(step)
                if step % config.checkpoint_every == 0 or step == config.steps:
                    recorder.save(step)
        except ServiceUnavailable:
            # A judge or reader does not answer. Save the completed steps; the next process repeats the current one.
            curriculum.restore(curriculum_state)
            recorder.save(step)
            if not stop:
                raise
            stopped = "signal"
        if stopped == "collapse":
            step, _ = recorder.restore()
            recorder.progress.note(f"ended at the last good checkpoint, of step {step}")
        if stopped != "signal" and task.held_out:
            if step and not recorder.start_metrics:
                recorder.start_metrics, _ = evaluate_policy(0)
            last = evaluate_policy(step)
            recorder.start_metrics = recorder.start_metrics or last[0]
        trained, left_out = sampled.trajectories, sampled.left_out
        if not trained and step == config.steps:
            trained, left_out = recorder.saved.load_sampled(step)
    nnx.update(decoder, learner.learned_params)
    after, evaluated = last if last is not None else ({}, [])
    return Outcome(
        step=step,
        stopped=stopped,
        start_metrics=recorder.start_metrics,
        final_metrics=after,
        seconds=recorder.seconds,
        last_trajectories=trained,
        left_out=left_out,
        eval_trajectories=evaluated,
        guard_message=reason,
    )


def _learn(
    config: RLConfig, step: int, sampled: SampledStep, recipe: Recipe, learner: Learner, recorder: RunRecorder
) -> dict[str, float]:
    """Update from the trajectories of a step (counted from 0). Returns metrics critic/... and train/... ."""
    left_out = sampled.left_out
    used, metrics = np.flatnonzero(~left_out), {"train/advantage_std": 0.0}
    trajectories = [sampled.trajectories[i] for i in used]
    # An episode whose first logits were not finite has no policy tokens.
    with_tokens = np.flatnonzero([t.policy_tokens > 0 for t in trajectories])
    if len(with_tokens):
        advantages = recipe.advantages(trajectories)[with_tokens]
        trajectories = [trajectories[i] for i in with_tokens]
        result = learner.learn(step, trajectories, advantages)
        metrics |= result.metrics
        if not result.finite:
            recorder.save_non_finite_batch(step + 1, trajectories, result)
    elif len(used):
        recorder.progress.note(
            f"step {step + 1}: no update: logits were not finite, so that no token was sampled"
        )
    else:
        recorder.progress.note(
            f"step {step + 1}: no update: in every group the rewards differ by at most "
            f"objective.drop_spread={config.drop_spread}, or the recipe leaves the group out"
        )
    totals, groups = np.array([(t.rewards["total"], t.group) for t in sampled.trajectories]).T
    return metrics | {
        "train/lr": learner.learning_rate,
        "train/zero_spread": float(low_spread(totals, groups).mean()),
        "train/left_out": float(left_out.mean()),
        "train/searches_failed": float(sampled.stats.searches_failed),
        "train/not_finite": float(sampled.stats.not_finite),
        "train/groups": float(len(np.unique(groups))),
    }


def _update_progress(
    step: int, metrics: Mapping[str, float], sampled: SampledStep, recorder: RunRecorder
) -> None:
    """Show a completed step on the progress line."""
    values = {"reward": metrics["reward/total"]}
    values |= {name: metrics[f"train/{name}"] for name in PROGRESS_METRICS if f"train/{name}" in metrics}
    recorder.progress.update(step, values, int(sum(t.policy_tokens for t in sampled.trajectories)))
