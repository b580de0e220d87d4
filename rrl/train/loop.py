"""The reinforcement-learning loop: questions, trajectories, rewards, advantages, update; evaluated and resumable."""

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
"""Metrics on the progress line, as far as a recipe has them."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What a run learns and is held against."""

    train: Sequence[Question]
    held_out: Sequence[Question]
    held_out_retriever: Retriever | None = None
    """Searches the held-out corpus; None: the engine's own."""


@dataclasses.dataclass
class Outcome:
    """How a run ended."""

    step: int
    stopped: str
    """done, signal, or collapse."""
    start_metrics: dict[str, float]
    final_metrics: dict[str, float]
    seconds: float
    """Training time of all lives of the run, without evaluations."""
    last_trajectories: list[Trajectory]
    """Trajectories of the last training step of this life; where the run was finished already, those of its last step that
    the page of trajectories shows."""
    left_out: Bool[np.ndarray, "N"]
    """Which of them the step did not learn from."""
    eval_trajectories: list[Trajectory]
    """Of the last evaluation, as `Shown` keeps them where it was done in a former life."""
    guard_message: str = ""
    """What the guard saw last."""


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
    ready: Callable[[], None] = lambda: None,
) -> Outcome:
    """Trains `decoder` in place, continuing what the workdir holds; the start is the frozen reference.

    `value_model` is where the critic starts (with `config.critic`). With `average_last` the decoder ends as the mean of the
    last updates' parameters. `ready` is called once nothing in the settings and questions was found wrong, before anything is
    written.

    Raises UserError when the workdir belongs to another config; SaveError where the workdir cannot be written; Unavailable where
    a judge or reader gives no answer, after a checkpoint.
    """
    learner = Learner(config, decoder, engine.mesh, value_model)
    curriculum = curriculum_of(recipe, task.train, config.questions, config.seed)
    ready()

    def measure(step: int) -> tuple[dict[str, float], list[Trajectory]]:
        """Evaluates the start (step 0, which the reference is) or what was learned, unless that has been done."""
        if known := recorder.past_evaluation(step):
            return known, recorder.saved.load_evaluated(step)
        began = time.perf_counter()
        recorder.progress.note(f"step {step}: evaluating on {len(task.held_out)} held-out questions ...")
        found, trajectories = evaluate(
            engine,
            learner.learned_params if step else learner.reference_params,
            recipe,
            task.held_out,
            temperature=config.eval_temperature,
            retriever=task.held_out_retriever,
            scoring=scoring.at_step(step, config.steps),
        )
        recorder.saved.save_evaluated(step, trajectories)
        return recorder.write_evaluation(step, found, time.perf_counter() - began), trajectories

    def evaluates(step: int) -> bool:
        """Whether what was learned is evaluated on the way, after so many updates."""
        due = config.eval_every and step % config.eval_every == 0 and 0 < step < config.steps
        return bool(task.held_out and due)

    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_requested())
        recorder = stack.enter_context(RunRecorder(config, identity or {}, learner, curriculum, workdir))
        step, stopped, reason, sampled = recorder.step, "done", recorder.guard_message, SampledStep()
        # The signal that ended the last life may have come before its evaluations.
        if step and task.held_out and not recorder.start_metrics:
            recorder.start_metrics, _ = measure(0)
        last = measure(step) if evaluates(step) else None
        if step:
            words = "finished already," if step == config.steps else "continues"
            recorder.progress.note(f"{words} after step {step} of {config.steps}")
        recorder.progress.begin()
        curriculum_state = curriculum.state
        try:
            while step < config.steps:
                if stop:  # it came during an evaluation
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
                # After the first update, which is what a user waits for.
                if task.held_out and not recorder.start_metrics and not stop:
                    with recorder.progress.paused():
                        recorder.start_metrics, _ = measure(0)
                last = None
                if seen := recorder.guard.check(step, metrics):
                    reason = seen
                    recorder.progress.note(f"step {step}: collapsed? {reason}")
                    if config.guard.action == "stop":
                        stopped = "collapse"
                        break
                if stop:
                    stopped = "signal" if step < config.steps else "done"
                    recorder.save(step)
                    break
                if evaluates(step):
                    with recorder.progress.paused():
                        last = measure(step)
                if step % config.checkpoint_every == 0 or step == config.steps:
                    recorder.save(step)
        except ServiceUnavailable:
            # Of a judge or reader: what was learned is kept, and the step under way is sampled again.
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
                recorder.start_metrics, _ = measure(0)
            last = measure(step)
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
    """Learns from what a step (counted from 0) sampled; returns critic/... and train/... ."""
    left_out = sampled.left_out
    used, metrics = np.flatnonzero(~left_out), {"train/advantage_std": 0.0}
    trajectories = [sampled.trajectories[i] for i in used]
    # An episode whose first logits were not finite wrote nothing that could be learned from.
    wrote = np.flatnonzero([t.policy_tokens > 0 for t in trajectories])
    if len(wrote):
        advantages = recipe.advantages(trajectories)[wrote]
        trajectories = [trajectories[i] for i in wrote]
        result = learner.learn(step, trajectories, advantages)
        metrics |= result.metrics
        if not result.finite:
            recorder.save_non_finite_batch(step + 1, trajectories, result)
    elif len(used):
        recorder.progress.note(
            f"step {step + 1}: nothing to learn from: logits were not finite, so that no token was written"
        )
    else:
        recorder.progress.note(
            f"step {step + 1}: nothing to learn from: in every group the rewards lie within "
            f"objective.drop_spread={config.drop_spread} of each other, or the recipe leaves it out"
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
    """One step more on the progress line."""
    shown = {"reward": metrics["reward/total"]}
    shown |= {name: metrics[f"train/{name}"] for name in PROGRESS_METRICS if f"train/{name}" in metrics}
    recorder.progress.update(step, shown, int(sum(t.policy_tokens for t in sampled.trajectories)))
