"""The reinforcement-learning loop: questions, trajectories, rewards, advantages, update; evaluated and resumable."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from rrl.data.questions import Question
from rrl.errors import UserError, at_least, at_most
from rrl.models.decoder import Decoder, computed
from rrl.models.heads import ValueModel
from rrl.recipes.base import Answers, Recipe
from rrl.retrieval.retriever import Retriever
from rrl.rl.advantages import low_spread
from rrl.rl.optim import (
    OptimConfig,
    init_optimizer,
    make_optimizer,
    make_schedule,
    running_mean,
    skipped_updates,
    split_trained,
)
from rrl.rl.refill import Refill
from rrl.rollout.engine import Engine
from rrl.rollout.trajectory import Trajectory
from rrl.train.checkpoints import Checkpoints, stop_requested
from rrl.train.critic import CriticConfig, State, make_critic
from rrl.train.dump import dump_batch
from rrl.train.guard import Guard, GuardConfig
from rrl.train.metrics import MetricsWriter, read_metrics
from rrl.train.objective import ObjectiveConfig
from rrl.train.progress import Progress
from rrl.train.rollouts import describe, evaluate, sample_rounds
from rrl.train.update import Updater


@dataclasses.dataclass(frozen=True)
class RLConfig:
    """Settings of one run of reinforcement learning."""

    steps: int
    """Updates; 0 only evaluates."""
    optim: OptimConfig
    objective: ObjectiveConfig
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    critic: CriticConfig | None = None
    """PPO: advantages come from a critic by GAE, and the recipe's own are not used; None: they are."""
    questions: int = 256
    """Questions a step."""
    samples: int = 5
    """Episodes a question: the group of GRPO."""
    rounds: int = 1
    """Above 1, dynamic sampling (DAPO): further questions are asked, at most so many times, until `questions` groups have
    rewards further apart than objective.drop_spread (None: that are not all equal); those are learned from."""
    temperature: float = 1.0
    seed: int = 0
    eval_every: int = 0
    """Steps between held-out evaluations; 0: before and after only."""
    eval_temperature: float = 0.0
    average_last: float = 0.0
    """Share of the updates, counted from the end, whose parameters are averaged (Polyak & Juditsky, 1992): the mean is
    what is evaluated and written, while episodes are sampled from the live parameters; 0: no averaging."""
    checkpoint_every: int = 20
    permute_rewards: bool = False
    """The control: rewards are dealt out at random over the batch, so that nothing can be learned from them."""

    def __post_init__(self) -> None:
        at_least(1, self, "questions", "samples", "rounds", "checkpoint_every", where="train.")
        at_least(0, self, "steps", "seed", "eval_every", "temperature", "eval_temperature", where="train.")
        at_most(2**32 - 1, self, "seed", where="train.")
        if not 0 <= self.average_last <= 1:
            raise UserError(
                f"train.average_last={self.average_last} must lie in 0..1, a share of the updates."
            )
        if self.steps and self.waits > self.steps:
            raise UserError(
                f"critic.warmup_steps={self.waits} must be at most train.steps={self.steps}: the policy waits for so many"
            )

    @property
    def waits(self) -> int:
        """Updates at the start in which only the critic learns."""
        return self.critic.warmup_steps if self.critic else 0

    @property
    def averaged_from(self) -> int:
        """Updates before the first whose parameters enter the mean."""
        return self.steps - round(self.average_last * self.steps)


MAY_DIFFER = ("checkpoint_every", *(f"guard.{field.name}" for field in dataclasses.fields(GuardConfig)))
"""Fields that a continued run may change: they do not touch its numbers."""


def learned_in_checkpoint(settings: Mapping[str, Any]) -> str:
    """Where in the state of a checkpoint the parameters are that the run has to show, by its config.json."""
    return "[2]" if settings["average_last"] else "[0]"


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
    """Trajectories of the last training step of this life; none where it was finished already."""
    evaluated: list[Trajectory]
    """Of the last evaluation, likewise."""
    reason: str = ""
    """What the guard saw."""


def question_order(count: int, size: int, seed: int, step: int, number: int = 0) -> np.ndarray:
    """Indices of the questions of a step's round: each epoch is a permutation, a pure function of its arguments."""
    size = min(size, count)
    per_epoch = count // size
    epoch, place = divmod(step, per_epoch)
    order = np.random.default_rng((seed, epoch, number) if number else (seed, epoch)).permutation(count)
    return order[place * size : (place + 1) * size]


def train(
    config: RLConfig,
    recipe: Recipe,
    task: Task,
    engine: Engine,
    decoder: Decoder,
    workdir: str | os.PathLike[str],
    *,
    reader: Answers | None = None,
    identity: Mapping[str, Any] | None = None,
    value_model: ValueModel | None = None,
) -> Outcome:
    """Trains `decoder` in place, continuing what the workdir holds; the start is the frozen reference.

    `value_model` is where the critic starts (with `config.critic`). With `average_last` the decoder ends as the mean of the
    last updates' parameters.

    Raises UserError when the workdir belongs to another config.
    """
    if (config.critic is None) != (value_model is None):
        raise UserError("train.critic and a value model go together; give both or neither")
    settings = dataclasses.asdict(config) | {"run": dict(identity or {})}
    graph, params, fixed = split_trained(decoder, config.optim.frozen)
    fixed = computed(fixed, decoder.dtype)
    nnx.update(decoder, fixed)  # lets go of the wider copy
    reference = jax.tree.map(lambda x: x.copy(), computed(params, decoder.dtype))
    optimizer = make_optimizer(config.optim)
    rate = make_schedule(config.optim)
    opt_state = init_optimizer(optimizer, params, engine.mesh)
    average = jax.tree.map(lambda x: x.copy(), params) if config.average_last else None
    critic = None
    values: list[State] = []  # the critic's, where there is one: a checkpoint without holds nothing of it
    if config.critic is not None and value_model is not None:
        critic, *values = make_critic(value_model, config.critic, config.objective, engine.mesh)
    # What a checkpoint gives back is bound to its device; so is this, or a continued run would compile its update anew.
    params, opt_state, average, *values = jax.tree.map(
        lambda x: jax.device_put(x, x.sharding), (params, opt_state, average, *values)
    )
    updater = Updater(graph, optimizer, config.objective, engine.mesh)
    base = jax.random.key(config.seed)
    extra: dict[str, Any] = {"before": {}, "seconds": 0.0}
    sampled: list[Trajectory] = []

    def ask(step: int, number: int, count: int) -> list[Question]:
        """`count` questions of a round of a step; each round goes through all in an order of its own."""
        order = question_order(len(task.train), config.questions, config.seed, step, number)
        return [task.train[i] for i in order[:count]]

    def learned() -> PyTree:
        """All parameters of what the run has to show so far."""
        return nnx.merge_state(params if average is None else average, fixed)

    def measure(step: int) -> tuple[dict[str, float], list[Trajectory]]:
        """Evaluates the start (step 0, which the reference is) or what was learned, unless that has been done."""
        if step in recorded:
            return recorded[step], []
        began = time.perf_counter()
        progress.note(f"step {step}: evaluating on {len(task.held_out)} held-out questions ...")
        found, trajectories = evaluate(
            engine,
            learned() if step else nnx.merge_state(reference, fixed),
            recipe,
            task.held_out,
            temperature=config.eval_temperature,
            retriever=task.held_out_retriever,
            reader=reader,
        )
        found |= {"time/eval": time.perf_counter() - began, "minutes": extra["seconds"] / 60 if step else 0.0}
        writer.write(step, found)
        recorded[step] = {"step": step} | found
        progress.note(
            f"step {step}: held-out EM {100 * found['eval/em']:.1f}  F1 {100 * found['eval/f1']:.1f}  "
            f"searches {found['eval/searches']:.2f}  ({found['time/eval']:.0f} s)"
        )
        return found, trajectories

    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(workdir, settings, may_differ=MAY_DIFFER))
        stop = stack.enter_context(stop_requested())
        start = 0
        if checkpoints.latest is not None:
            (params, opt_state, average, *values), extra = checkpoints.restore(
                (params, opt_state, average, *values)
            )
            start = int(extra["step"])
        elif config.guard.action == "stop":
            # What a run goes back to that collapses before its first checkpoint.
            checkpoints.save(0, (params, opt_state, average, *values), extra | {"step": 0})
        writer = stack.enter_context(MetricsWriter(workdir, start))
        recorded = {line["step"]: line for line in read_metrics(writer.path) if "eval/em" in line}
        progress = stack.enter_context(Progress(config.steps, start, "train"))
        step, stopped, guard, reason = start, "done", Guard(config.guard), ""
        last: tuple[dict[str, float], list[Trajectory]] | None = None
        due = config.eval_every and start % config.eval_every == 0 and 0 < start < config.steps
        if task.held_out and due:  # the signal that ended the last life came before it
            last = measure(start)

        def save() -> None:
            """Keeps what there is: but not while a collapse shows that would end the run, which then goes back."""
            if step == config.steps or config.guard.action != "stop" or not guard.suspects:
                checkpoints.save(step, (params, opt_state, average, *values), extra | {"step": step})

        progress.begin()
        states = [opt_state, *(state for _, state in values)]
        skipped = {
            name: float(skipped_updates(state))
            for name, state in zip(("train/skipped", "critic/skipped"), states, strict=False)
        }
        while step < config.steps:
            if stop:  # it came during an evaluation
                stopped = "signal"
                save()
                break
            began = time.perf_counter()
            found = sample_rounds(
                engine,
                nnx.merge_state(params, fixed),
                recipe,
                functools.partial(ask, step),
                Refill(config.questions, config.rounds, config.objective.drop_spread or 0.0),
                key=jax.random.fold_in(base, step),
                samples=config.samples,
                temperature=config.temperature,
                reader=reader,
            )
            sampled, stats = found.trajectories, found.stats
            rolled = time.perf_counter()
            metrics = describe(sampled, "train")
            if config.permute_rewards:
                permute_rewards(sampled, np.random.default_rng((config.seed, step)))
            advantages = recipe.advantages(sampled)
            totals, groups = np.array([(t.rewards["total"], t.group) for t in sampled]).T
            left_out = config.objective.left_out(sampled)
            if config.rounds > 1:
                left_out = np.array([t.group not in found.kept for t in sampled])
            used = np.flatnonzero(~left_out)
            if len(used):
                learned_from = [sampled[i] for i in used]
                if critic is None:
                    credit = updater.credit(reference, fixed, learned_from, advantages[used])
                else:
                    penalties = updater.kl_penalties(reference, fixed, learned_from)
                    estimate = critic.estimate(values[0], learned_from, penalties)
                    credit = estimate.advantages
                    values[0], lesson = critic.learn(values[0], learned_from, estimate)
                    metrics |= {f"critic/{name}": value for name, value in lesson.items()}
                if step >= config.waits:
                    params, opt_state, update = updater(
                        params, opt_state, reference, fixed, learned_from, credit
                    )
                    metrics |= {f"train/{name}": value for name, value in update.items()}
                counted = {name: metrics.get(name, before) for name, before in skipped.items()}
                if counted != skipped:
                    file = dump_batch(checkpoints.workdir / "not_finite", step + 1, learned_from, credit)
                    kept = f"; the batch is in {file}" if file else ""
                    progress.note(f"step {step + 1}: a gradient was not finite, its update is left out{kept}")
                    skipped = counted
            else:
                progress.note(
                    f"step {step + 1}: nothing to learn from: in every group the rewards lie within "
                    f"objective.drop_spread={config.objective.drop_spread} of each other"
                )
            step += 1
            if average is not None:
                average = running_mean(average, params, max(1, step - config.averaged_from))
            steps_taken = max(step - config.waits, 0) * config.objective.optimizer_steps
            done = time.perf_counter()
            extra["seconds"] += done - began
            metrics |= {
                "train/lr": float(rate(steps_taken - 1)) if steps_taken else 0.0,
                "train/zero_spread": float(low_spread(totals, groups).mean()),
                "train/left_out": float(left_out.mean()),
                "train/advantage_std": float(advantages.std()),
                "train/searches_failed": float(stats.searches_failed),
                "train/groups": float(len(np.unique(groups))),
                "time/rollout": stats.seconds,
                "time/retrieval": stats.retrieval_seconds,
                "time/score": rolled - began - stats.seconds,
                "time/update": done - rolled,
                "time/step": done - began,
                "minutes": extra["seconds"] / 60,
            }
            progress.update(
                step,
                {
                    "reward": metrics["reward/total"],
                    "em": metrics["train/em"],
                    "searches": metrics["train/searches"],
                },
                int(sum(t.policy_tokens for t in sampled)),
            )
            if task.held_out and not extra["before"] and not stop:  # a first update is what a user waits for
                with progress.paused():
                    extra["before"], _ = measure(0)
            writer.write(step, metrics)
            last = None
            if reason := guard.look(step, metrics):
                progress.note(f"step {step}: collapsed? {reason}")
                if config.guard.action == "stop":
                    stopped = "collapse"
                    break
            if stop:
                stopped = "signal" if step < config.steps else "done"
                save()
                break
            if config.eval_every and step % config.eval_every == 0 and step < config.steps and task.held_out:
                with progress.paused():
                    last = measure(step)
            if step % config.checkpoint_every == 0 or step == config.steps:
                save()
        if stopped == "collapse":
            (params, opt_state, average, *values), extra = checkpoints.restore(
                (params, opt_state, average, *values)
            )
            step = int(extra["step"])
            progress.note(f"ended at the last good checkpoint, of step {step}")
        if stopped != "signal" and task.held_out:
            last = last or measure(step)
            extra["before"] = extra["before"] or (measure(0) if step else last)[0]
    nnx.update(decoder, learned())
    after, evaluated = last if last is not None else ({}, [])
    return Outcome(step, stopped, extra["before"], after, extra["seconds"], sampled, evaluated, reason)


def permute_rewards(trajectories: Sequence[Trajectory], rng: np.random.Generator) -> None:
    """Deals the totals, and what turns earned, out at random over the batch, in place."""
    totals = rng.permutation([t.rewards["total"] for t in trajectories])
    for trajectory, total in zip(trajectories, totals, strict=True):
        trajectory.rewards["total"] = float(total)
    paid = [(t.turn_rewards, turn) for t in trajectories if t.turn_rewards for turn in t.turn_rewards]
    earned = rng.permutation([rewards[turn] for rewards, turn in paid])
    for (rewards, turn), reward in zip(paid, earned, strict=True):
        rewards[turn] = float(reward)
