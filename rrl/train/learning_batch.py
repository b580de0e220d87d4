"""The choice of what a training step learns from: which trajectories, with which advantages."""

import numpy as np

from rrl.recipes.base import Recipe
from rrl.train.learner import Learner, LearningBatch
from rrl.train.rl_config import RLConfig
from rrl.train.sample import SampledStep, usable_groups


def learning_batch(config: RLConfig, sampled: SampledStep, recipe: Recipe, learner: Learner) -> LearningBatch:
    """Select trajectories and compute their advantages. Nothing else decides what a step learns from.

    1. Groups: the first `config.questions` usable ones, in sampling order: their rewards differ by more than
       `objective.drop_spread`, and the recipe does not exclude them.
    2. Trajectories of these groups with at least one policy token. (An episode whose first logits were not finite has none.)
    3. Advantages: the recipe's, over all trajectories of the groups. `Learner.batch` makes them final: a critic replaces
       them, a KL penalty in the reward is subtracted, and they are whitened, if the objective has these.
    """
    selected = set(usable_groups(config, sampled.trajectories, recipe)[: config.questions])
    left_out = np.array([t.group not in selected for t in sampled.trajectories], bool)
    grouped = [t for t in sampled.trajectories if t.group in selected]
    written = np.flatnonzero([t.policy_tokens > 0 for t in grouped])
    if not len(written):
        return LearningBatch(left_out)
    advantages = recipe.advantages(grouped)[written]
    return learner.batch([grouped[i] for i in written], advantages, left_out)
