"""Selects the trajectories that a training step learns from (`select_trajectories`) and computes their advantages."""

import numpy as np
from jaxtyping import Bool

from rrl.data.trajectory import Trajectory
from rrl.recipes.base import Recipe
from rrl.train.learner import Learner, LearningBatch
from rrl.train.rl_config import RLConfig
from rrl.train.sample import SampledStep, usable_groups


def select_trajectories(
    config: RLConfig, sampled: SampledStep, recipe: Recipe
) -> tuple[list[Trajectory], Bool[np.ndarray, "N"]]:
    """Select the first `config.questions` usable groups, in sampling order.

    A group is usable if its rewards differ by more than `objective.drop_spread` and the recipe does not exclude it.

    Returns:
        The trajectories of the selected groups, and `left_out`: [N] True for the sampled trajectories of all other groups.
    """
    selected = set(usable_groups(config, sampled.trajectories, recipe)[: config.questions])
    left_out = np.array([t.group not in selected for t in sampled.trajectories], bool)
    return [t for t in sampled.trajectories if t.group in selected], left_out


def compute_advantages(
    trajectories: list[Trajectory], left_out: Bool[np.ndarray, "N"], recipe: Recipe, learner: Learner
) -> LearningBatch:
    """Compute the advantages of the selected trajectories.

    The recipe computes them over all trajectories of the groups. Then trajectories without a policy token are removed. (An
    episode whose first logits were not finite has no policy token.) `Learner.make_batch` applies the critic, the KL penalty in
    the reward and whitening, each if the run has it.

    Args:
        trajectories: trajectories of the selected groups.
        left_out: see `select_trajectories`.
        recipe: computes the advantages of a run without a critic.
        learner: has the critic and the reference.
    """
    nonempty = np.flatnonzero([t.policy_tokens > 0 for t in trajectories])
    if not len(nonempty):
        return LearningBatch(left_out)
    advantages = recipe.advantages(trajectories)[nonempty]
    return learner.make_batch([trajectories[i] for i in nonempty], advantages, left_out)
