"""Samples and scores the episodes of a training step. Read `sample_step` first."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from rrl.data.trajectory import Trajectory
from rrl.recipes.base import Recipe, ScoringContext
from rrl.recipes.episodes import run_questions
from rrl.rl.dynamic_sampling import groups_to_sample, informative_groups
from rrl.rl.overlong import overlong_penalty
from rrl.rollout.curriculum import Curriculum
from rrl.rollout.engine import Engine, RolloutStats
from rrl.train.rl_config import RLConfig


@dataclasses.dataclass(frozen=True)
class SampledStep:
    """The scored episodes of a training step."""

    trajectories: list[Trajectory]
    """N trajectories. Their groups are numbered over all rounds."""
    stats: RolloutStats
    """Rollout statistics, summed over all rounds."""
    seconds: float
    """Duration of sampling and scoring."""


def sample_step(
    config: RLConfig,
    step: int,
    engine: Engine,
    params: PyTree,
    recipe: Recipe,
    curriculum: Curriculum,
    scoring: ScoringContext,
) -> SampledStep:
    """Sample and score the episodes of a training step.

    Rounds of episodes are sampled until `config.questions` groups are informative (dynamic sampling), or `config.rounds`
    rounds are done. A pure function of its arguments and of the curriculum's state, which it updates.

    Args:
        config: settings of the run.
        step: number of the step, from 0.
        engine: samples the episodes.
        params: parameters of the policy.
        recipe: prompts, environment and rewards.
        curriculum: selects the questions, and learns from the scored trajectories of each round.
        scoring: models that the rewards use.
    """
    began = time.perf_counter()
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    trajectories: list[Trajectory] = []
    stats = RolloutStats()
    groups = 0
    for number in range(config.rounds):
        count = groups_to_sample(config.questions, groups, len(usable_groups(config, trajectories, recipe)))
        if not count:
            break
        sampled = run_questions(
            engine,
            params,
            recipe,
            curriculum.select(step, number, count),
            key=jax.random.fold_in(key, number) if number else key,
            samples=config.samples,
            temperature=config.temperatures or config.temperature,
            scoring=scoring.at_step(step, config.steps),
        )
        curriculum.update(sampled)
        if config.overlong:
            apply_overlong_penalty(sampled, *config.overlong)
        if config.permute_rewards:
            # Before groups are selected: a selection by the true rewards would reveal what the control must not know.
            permute_rewards(
                sampled, np.random.default_rng((config.seed, step, *([number] if number else [])))
            )
        for trajectory in sampled:
            trajectory.group += groups
        groups += len({trajectory.group for trajectory in sampled})
        trajectories += sampled
        stats += engine.stats
    return SampledStep(trajectories, stats, time.perf_counter() - began)


def usable_groups(config: RLConfig, trajectories: Sequence[Trajectory], recipe: Recipe) -> list[int]:
    """Return the ids of the groups with different rewards that the recipe does not exclude, in sampling order."""
    if not trajectories:
        return []
    totals = np.array([t.rewards["total"] for t in trajectories])
    groups = np.array([t.group for t in trajectories], np.int64)
    return informative_groups(totals, groups, config.drop_spread, recipe.excluded(trajectories))


def apply_overlong_penalty(trajectories: Sequence[Trajectory], longest: int, cache: int) -> None:
    """Add DAPO's penalty for long outputs (`overlong_penalty`) to the rewards, in place.

    It becomes the component "overlong" and is added to "total" and, if turns have rewards, to the last turn's reward.
    """
    penalties = overlong_penalty(np.array([t.policy_tokens for t in trajectories]), longest, cache)
    for trajectory, penalty in zip(trajectories, penalties.tolist(), strict=True):
        trajectory.rewards["overlong"] = penalty
        trajectory.rewards["total"] += penalty
        if trajectory.turn_rewards:
            trajectory.turn_rewards[max(trajectory.turn_rewards)] += penalty


def permute_rewards(trajectories: Sequence[Trajectory], rng: np.random.Generator) -> None:
    """Permute rewards at random over the batch, in place. The components of a trajectory's reward stay together.

    Turn rewards are permuted over all turns of the batch.
    """
    components = [t.rewards for t in trajectories]
    for trajectory, place in zip(trajectories, rng.permutation(np.arange(len(components))), strict=True):
        trajectory.rewards = dict(components[place])
    paid = [(t.turn_rewards, turn) for t in trajectories if t.turn_rewards for turn in t.turn_rewards]
    earned = rng.permutation([rewards[turn] for rewards, turn in paid])
    for (rewards, turn), reward in zip(paid, earned, strict=True):
        rewards[turn] = float(reward)
