"""Samples and scores the episodes of a training step, and selects those to learn from. Read `sample_and_score` first."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Bool, PyTree

from rrl.data.trajectory import Trajectory
from rrl.recipes.base import Recipe, ScoringContext
from rrl.recipes.episodes import Sampling, run_questions
from rrl.rl.dynamic_sampling import groups_to_sample, informative_groups
from rrl.rl.overlong import overlong_penalty
from rrl.rollout.curriculum import Curriculum
from rrl.rollout.engine import Engine, RolloutStats
from rrl.setup.rl_config import RLConfig


@dataclasses.dataclass(frozen=True)
class SampledStep:
    """The scored episodes of a training step."""

    trajectories: list[Trajectory]
    """N trajectories. Group ids are unique over all rounds of the step."""
    stats: RolloutStats
    """Rollout statistics, summed over all rounds."""
    seconds: float
    """Duration of sampling and scoring."""


def sample_and_score(
    config: RLConfig,
    step: int,
    engine: Engine,
    params: PyTree,
    recipe: Recipe,
    curriculum: Curriculum,
    scoring: ScoringContext,
) -> SampledStep:
    """Sample and score the episodes of a training step.

    Rounds of episodes are sampled until `config.questions` groups are informative (DAPO's dynamic sampling; see
    `informative_group_ids`), or `config.rounds` rounds are done. The result depends on the arguments and the curriculum's state
    alone; that state is updated.

    Args:
        config: settings of the run.
        step: number of the step, from 0.
        engine: samples the episodes.
        params: parameters of the policy.
        recipe: prompts, environment and rewards.
        curriculum: selects the questions, and learns from the scored trajectories of each round.
        scoring: models and functions that the rewards use.
    """
    began = time.perf_counter()
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    trajectories: list[Trajectory] = []
    stats = RolloutStats()
    group_count = 0
    for round_index in range(config.rounds):
        informative = len(informative_group_ids(config, trajectories, recipe))
        count = groups_to_sample(config.questions, group_count, informative)
        if not count:
            break
        sampled = run_questions(
            engine,
            params,
            recipe,
            curriculum.select(step, round_index, count),
            Sampling(
                # Round 0 uses the key of the step unchanged. A run without dynamic sampling has only round 0.
                jax.random.fold_in(key, round_index) if round_index else key,
                config.samples,
                config.temperatures or config.temperature,
            ),
            scoring=scoring.at_step(step, config.steps),
        )
        curriculum.update(sampled)
        if config.overlong:
            apply_overlong_penalty(sampled, *config.overlong)
        if config.permute_rewards:
            # Permute before groups are selected: a selection by the true rewards would leak them into the control.
            seed = (config.seed, step, *([round_index] if round_index else []))
            permute_rewards(sampled, np.random.default_rng(seed))
        for trajectory in sampled:
            trajectory.group += group_count
        group_count += len({trajectory.group for trajectory in sampled})
        trajectories += sampled
        stats += engine.stats
    return SampledStep(trajectories, stats, time.perf_counter() - began)


def select_trajectories(
    config: RLConfig, sampled: SampledStep, recipe: Recipe
) -> tuple[list[Trajectory], Bool[np.ndarray, "N"]]:
    """Select the trajectories of the first `config.questions` informative groups (`informative_group_ids`), in sampling order.

    Returns:
        The selected trajectories, and `left_out`: [N] True for the sampled trajectories that are not selected.
    """
    selected = set(informative_group_ids(config, sampled.trajectories, recipe)[: config.questions])
    left_out = np.array([t.group not in selected for t in sampled.trajectories], bool)
    return [t for t in sampled.trajectories if t.group in selected], left_out


def informative_group_ids(config: RLConfig, trajectories: Sequence[Trajectory], recipe: Recipe) -> list[int]:
    """Return the ids of the groups that an update can learn from, in sampling order.

    The rewards within such a group differ by more than `config.drop_spread`, and the recipe does not exclude all of its
    trajectories.
    """
    if not trajectories:
        return []
    totals = np.array([t.rewards["total"] for t in trajectories])
    groups = np.array([t.group for t in trajectories], np.int64)
    return informative_groups(totals, groups, config.drop_spread, recipe.excluded(trajectories))


def apply_overlong_penalty(trajectories: Sequence[Trajectory], longest: int, cache: int) -> None:
    """Add DAPO's penalty for long outputs (`overlong_penalty`) to the rewards, in place.

    It becomes the component "overlong" and is added to "total" and, if turns have rewards, to the last turn's reward.

    Args:
        trajectories: scored trajectories.
        longest: L_max of DAPO, in policy tokens: the penalty is -1 from here on.
        cache: L_cache of DAPO: number of last tokens before `longest` over which it falls from 0 to -1.
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
    for trajectory, source in zip(trajectories, rng.permutation(np.arange(len(components))), strict=True):
        trajectory.rewards = dict(components[source])
    rewarded_turns = [
        (t.turn_rewards, turn) for t in trajectories if t.turn_rewards for turn in t.turn_rewards
    ]
    permuted = rng.permutation([rewards[turn] for rewards, turn in rewarded_turns])
    for (rewards, turn), reward in zip(rewarded_turns, permuted, strict=True):
        rewards[turn] = float(reward)
