"""What a training step samples: rounds of scored rollouts, and the groups to learn from; and an evaluation during training."""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Bool, PyTree

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Trajectory
from rrl.recipes.base import NO_MODELS, Recipe, ScoringContext
from rrl.recipes.episodes import run_questions
from rrl.retrieval.retriever import Retriever
from rrl.rl.dynamic_sampling import DynamicSampling
from rrl.rl.overlong import overlong_penalty
from rrl.rollout.curriculum import Curriculum
from rrl.rollout.engine import Engine, RolloutStats
from rrl.train.rl_config import RLConfig


@dataclasses.dataclass(frozen=True)
class SampledStep:
    """What a training step samples."""

    trajectories: list[Trajectory] = dataclasses.field(default_factory=list)
    """Scored; groups are numbered over all rounds."""
    used_groups: frozenset[int] = frozenset()
    """The groups to learn from."""
    stats: RolloutStats = dataclasses.field(default_factory=RolloutStats)
    """Of all rounds."""

    @property
    def left_out(self) -> Bool[np.ndarray, "N"]:
        """Which of the trajectories the update does not see."""
        return np.array([t.group not in self.used_groups for t in self.trajectories], bool)


def sample_step(
    config: RLConfig,
    step: int,
    engine: Engine,
    params: PyTree,
    recipe: Recipe,
    curriculum: Curriculum,
    scoring: ScoringContext,
) -> SampledStep:
    """What a step (counted from 0) samples: a pure function of its arguments and of the curriculum's state, which goes on."""

    def ask(number: int, count: int) -> list[Question]:
        return curriculum.select(step, number, count)

    def shuffle(number: int) -> np.random.Generator:
        return np.random.default_rng((config.seed, step, number) if number else (config.seed, step))

    return sample_rounds(
        engine,
        params,
        recipe,
        ask,
        DynamicSampling(config.questions, config.rounds, config.drop_spread),
        key=jax.random.fold_in(jax.random.key(config.seed), step),
        samples=config.samples,
        temperature=config.temperatures or config.temperature,
        scoring=scoring.at_step(step, config.steps),
        learn=curriculum.update,
        shuffle=shuffle if config.permute_rewards else None,
        overlong=config.overlong,
    )


def sample_rounds(
    engine: Engine,
    params: PyTree,
    recipe: Recipe,
    ask: Callable[[int, int], Sequence[Question]],
    dynamic_sampling: DynamicSampling,
    *,
    key: jax.Array,
    samples: int,
    temperature: float | Sequence[float],
    scoring: ScoringContext,
    learn: Callable[[Sequence[Trajectory]], None] = lambda trajectories: None,
    shuffle: Callable[[int], np.random.Generator] | None = None,
    overlong: tuple[int, ...] = (),
) -> SampledStep:
    """Rounds of rollouts until `dynamic_sampling` has enough groups with spread; one round if it allows no more.

    `ask(round, n)` gives n questions, and `learn` is told what came of them before it is asked again. A step is a pure function
    of parameters, key and questions: round 0 samples with `key` itself, a later one with its number folded in. With
    `shuffle(round)` the rewards of each round are dealt out at random before groups are chosen by them: a choice by the true
    ones would tell what the control must not know. `overlong` is `RLConfig.overlong`.
    """
    found: list[Trajectory] = []
    stats = RolloutStats()
    while not dynamic_sampling.done:
        number = dynamic_sampling.rounds
        some = run_questions(
            engine,
            params,
            recipe,
            ask(number, dynamic_sampling.next_round),
            key=jax.random.fold_in(key, number) if number else key,
            samples=samples,
            temperature=temperature,
            scoring=scoring,
        )
        learn(some)
        if overlong:
            apply_overlong_penalty(some, *overlong)
        if shuffle is not None:
            permute_rewards(some, shuffle(number))
        for trajectory in some:
            trajectory.group += dynamic_sampling.sampled
        totals, groups = np.array([(t.rewards["total"], t.group) for t in some]).T
        dynamic_sampling = dynamic_sampling.after(totals, groups.astype(np.int64), recipe.excluded(some))
        found += some
        stats += engine.stats
    return SampledStep(found, frozenset(dynamic_sampling.selected), stats)


def apply_overlong_penalty(trajectories: Sequence[Trajectory], longest: int, cache: int) -> None:
    """Adds DAPO's penalty for long outputs (`overlong_penalty`) to the rewards, as "overlong", to their total, and to what the
    last turn earned, where turns earn; in place."""
    penalties = overlong_penalty(np.array([t.policy_tokens for t in trajectories]), longest, cache)
    for trajectory, penalty in zip(trajectories, penalties.tolist(), strict=True):
        trajectory.rewards["overlong"] = penalty
        trajectory.rewards["total"] += penalty
        if trajectory.turn_rewards:
            trajectory.turn_rewards[max(trajectory.turn_rewards)] += penalty


def permute_rewards(trajectories: Sequence[Trajectory], rng: np.random.Generator) -> None:
    """Deals the rewards (all components of one together), and what turns earned, out at random over the batch, in place."""
    components = [t.rewards for t in trajectories]
    for trajectory, place in zip(trajectories, rng.permutation(np.arange(len(components))), strict=True):
        trajectory.rewards = dict(components[place])
    paid = [(t.turn_rewards, turn) for t in trajectories if t.turn_rewards for turn in t.turn_rewards]
    earned = rng.permutation([rewards[turn] for rewards, turn in paid])
    for (rewards, turn), reward in zip(paid, earned, strict=True):
        rewards[turn] = float(reward)


def trajectory_metrics(trajectories: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    """Means over trajectories: rewards by component, metrics, tokens by role, and the shares of each way of ending and of those
    that met a limit."""
    count = max(len(trajectories), 1)
    out: dict[str, float] = {}
    for name in trajectories[0].rewards if trajectories else ():
        out[f"reward/{name}"] = float(np.mean([t.rewards[name] for t in trajectories]))
    for name in trajectories[0].metrics if trajectories else ():
        out[f"{prefix}/{name}"] = float(np.mean([t.metrics[name] for t in trajectories]))
    for role, name in ((PROMPT, "prompt"), (POLICY, "policy"), (ENVIRONMENT, "environment")):
        out[f"tokens/{name}"] = float(np.mean([(t.roles == role).sum() for t in trajectories]))
    for reason, number in collections.Counter(t.ended for t in trajectories).items():
        out[f"ended/{reason}"] = number / count
    for limit, number in collections.Counter(
        name for t in trajectories for name in {c[1] for c in t.cuts}
    ).items():
        out[f"cut/{limit}"] = number / count
    return out


def evaluate(
    engine: Engine,
    params: PyTree,
    recipe: Recipe,
    questions: Sequence[Question],
    *,
    temperature: float = 0.0,
    retriever: Retriever | None = None,
    scoring: ScoringContext = NO_MODELS,
    on_finish: Callable[[int, Trajectory], None] = lambda place, trajectory: None,
) -> tuple[dict[str, float], list[Trajectory]]:
    """One episode a question (greedy unless told): "eval/em", "eval/f1", ... and each metric of each kind, "eval/em/<kind>"; and
    how many searches failed, and how many episodes ended where logits were not finite, for which all of them may be low."""
    trajectories = run_questions(
        engine,
        params,
        recipe,
        questions,
        key=jax.random.key(0),
        temperature=temperature,
        retriever=retriever,
        scoring=scoring,
        on_finish=on_finish,
    )
    found = {k: v for k, v in trajectory_metrics(trajectories, "eval").items() if k.startswith("eval/")}
    for kind in dict.fromkeys(q.kind for q in questions if q.kind):
        of_kind = [t for t in trajectories if t.question.kind == kind]
        for name in of_kind[0].metrics:
            found[f"eval/{name}/{kind}"] = float(np.mean([t.metrics[name] for t in of_kind]))
    found["eval/searches_failed"] = float(engine.stats.searches_failed)
    found["eval/not_finite"] = float(engine.stats.not_finite)
    return found, trajectories
