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
from rrl.models.hardware import memory_used
from rrl.models.heads import ValueModel
from rrl.recipes.base import NO_MODELS, Recipe, ScoringContext, curriculum_of
from rrl.retrieval.retriever import Retriever
from rrl.rl.advantages import low_spread
from rrl.rollout.engine import Engine
from rrl.stopping import Unavailable, stop_requested
from rrl.train.learner import Learner
from rrl.train.record import Record
from rrl.train.rl_config import RLConfig
from rrl.train.sample import Sampled, describe, evaluate, sample_step

SHOWN = ("em", "full_recall", "searches")
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
    before: dict[str, float]
    after: dict[str, float]
    seconds: float
    """Training time of all lives of the run, without evaluations."""
    sampled: list[Trajectory]
    """Trajectories of the last training step of this life; where the run was finished already, those of its last step that
    the page of trajectories shows."""
    left_out: Bool[np.ndarray, "N"]
    """Which of them the step did not learn from."""
    evaluated: list[Trajectory]
    """Of the last evaluation, as `Shown` keeps them where it was done in a former life."""
    reason: str = ""
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
        if known := record.evaluation(step):
            return known, record.shown.evaluated(step)
        began = time.perf_counter()
        record.progress.note(f"step {step}: evaluating on {len(task.held_out)} held-out questions ...")
        found, trajectories = evaluate(
            engine,
            learner.learned if step else learner.start,
            recipe,
            task.held_out,
            temperature=config.eval_temperature,
            retriever=task.held_out_retriever,
            scoring=scoring.at_step(step, config.steps),
        )
        record.shown.save_evaluated(step, trajectories)
        return record.evaluated(step, found, time.perf_counter() - began), trajectories

    def evaluates(step: int) -> bool:
        """Whether what was learned is evaluated on the way, after so many updates."""
        due = config.eval_every and step % config.eval_every == 0 and 0 < step < config.steps
        return bool(task.held_out and due)

    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_requested())
        record = stack.enter_context(Record(config, identity or {}, learner, curriculum, workdir))
        step, stopped, reason, sampled = record.step, "done", record.reason, Sampled()
        # The signal that ended the last life may have come before its evaluations.
        if step and task.held_out and not record.before:
            record.before, _ = measure(0)
        last = measure(step) if evaluates(step) else None
        if step:
            words = "finished already," if step == config.steps else "continues"
            record.progress.note(f"{words} after step {step} of {config.steps}")
        record.progress.begin()
        curriculum_state = curriculum.state
        try:
            while step < config.steps:
                if stop:  # it came during an evaluation
                    stopped = "signal"
                    record.save(step)
                    break
                began = time.perf_counter()
                sampled = sample_step(config, step, engine, learner.policy, recipe, curriculum, scoring)
                rolled = time.perf_counter()
                metrics = describe(sampled.trajectories, "train")
                metrics |= _learn(config, step, sampled, recipe, learner, record)
                step, curriculum_state = step + 1, curriculum.state
                learner.average(step)
                done = time.perf_counter()
                record.seconds += done - began
                metrics |= {
                    "rollout/busy": sampled.stats.busy,
                    "rollout/tokens_per_step": sampled.stats.tokens_per_step,
                    "rollout/tokens_per_second": sampled.stats.tokens_per_second,
                    "time/rollout": sampled.stats.seconds,
                    "time/retrieval": sampled.stats.retrieval_seconds,
                    "time/score": rolled - began - sampled.stats.seconds,
                    "time/update": done - rolled,
                    "time/step": done - began,
                    "minutes": record.seconds / 60,
                } | memory_used()
                _show(step, metrics, sampled, record)
                if step == config.steps:
                    record.shown.save_sampled(step, sampled.trajectories, sampled.left_out)
                record.check()
                record.writer.write(step, metrics)
                # After the first update, which is what a user waits for.
                if task.held_out and not record.before and not stop:
                    with record.progress.paused():
                        record.before, _ = measure(0)
                last = None
                if seen := record.guard.look(step, metrics):
                    reason = seen
                    record.progress.note(f"step {step}: collapsed? {reason}")
                    if config.guard.action == "stop":
                        stopped = "collapse"
                        break
                if stop:
                    stopped = "signal" if step < config.steps else "done"
                    record.save(step)
                    break
                if evaluates(step):
                    with record.progress.paused():
                        last = measure(step)
                if step % config.checkpoint_every == 0 or step == config.steps:
                    record.save(step)
        except Unavailable:
            # Of a judge or reader: what was learned is kept, and the step under way is sampled again.
            curriculum.restore(curriculum_state)
            record.save(step)
            if not stop:
                raise
            stopped = "signal"
        if stopped == "collapse":
            step, _ = record.restore()
            record.progress.note(f"ended at the last good checkpoint, of step {step}")
        if stopped != "signal" and task.held_out:
            if step and not record.before:
                record.before, _ = measure(0)
            last = measure(step)
            record.before = record.before or last[0]
        trained, left_out = sampled.trajectories, sampled.left_out
        if not trained and step == config.steps:
            trained, left_out = record.shown.sampled(step)
    nnx.update(decoder, learner.learned)
    after, evaluated = last if last is not None else ({}, [])
    return Outcome(
        step=step,
        stopped=stopped,
        before=record.before,
        after=after,
        seconds=record.seconds,
        sampled=trained,
        left_out=left_out,
        evaluated=evaluated,
        reason=reason,
    )


def _learn(
    config: RLConfig, step: int, sampled: Sampled, recipe: Recipe, learner: Learner, record: Record
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
        lesson = learner.learn(step, trajectories, advantages)
        metrics |= lesson.metrics
        if not lesson.finite:
            record.not_finite(step + 1, trajectories, lesson)
    elif len(used):
        record.progress.note(
            f"step {step + 1}: nothing to learn from: logits were not finite, so that no token was written"
        )
    else:
        record.progress.note(
            f"step {step + 1}: nothing to learn from: in every group the rewards lie within "
            f"objective.drop_spread={config.drop_spread} of each other, or the recipe leaves it out"
        )
    totals, groups = np.array([(t.rewards["total"], t.group) for t in sampled.trajectories]).T
    return metrics | {
        "train/lr": learner.rate,
        "train/zero_spread": float(low_spread(totals, groups).mean()),
        "train/left_out": float(left_out.mean()),
        "train/searches_failed": float(sampled.stats.searches_failed),
        "train/not_finite": float(sampled.stats.not_finite),
        "train/groups": float(len(np.unique(groups))),
    }


def _show(step: int, metrics: Mapping[str, float], sampled: Sampled, record: Record) -> None:
    """One step more on the progress line."""
    shown = {"reward": metrics["reward/total"]}
    shown |= {name: metrics[f"train/{name}"] for name in SHOWN if f"train/{name}" in metrics}
    record.progress.update(step, shown, int(sum(t.policy_tokens for t in sampled.trajectories)))
