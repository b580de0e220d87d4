"""The control experiment with permuted rewards."""

import jax
import numpy as np
from flax import nnx

from rrl.recipes.episodes import Sampling, run_questions
from rrl.train.sample import permute_rewards
from tests.train.small_run import fresh


def test_the_components_of_a_permuted_reward_stay_together(parts):
    questions, engine, recipe = parts
    trajectories = run_questions(
        engine, nnx.state(fresh()), recipe, questions[:3], Sampling(jax.random.key(0), samples=4)
    )
    for place, t in enumerate(trajectories):
        t.rewards = {"answer": float(place), "total": 2.0 * place}
    permute_rewards(trajectories, np.random.default_rng(0))
    answers = [t.rewards["answer"] for t in trajectories]
    assert sorted(answers) == list(range(12)) and answers != list(range(12))
    assert [t.rewards["total"] for t in trajectories] == [2 * answer for answer in answers]
    assert len({id(t.rewards) for t in trajectories}) == 12


def test_permuted_turn_rewards_keep_their_multiset(parts):
    questions, engine, recipe = parts
    trajectories = run_questions(
        engine, nnx.state(fresh()), recipe, questions[:3], Sampling(jax.random.key(0), samples=4)
    )
    for place, t in enumerate(trajectories):
        t.turn_rewards = {0: float(place)}
    permute_rewards(trajectories, np.random.default_rng(0))
    permuted = [t.turn_rewards[0] for t in trajectories]
    assert sorted(permuted) == list(range(12)) and permuted != list(range(12))
    assert all(t.token_rewards.sum() == t.turn_rewards[0] for t in trajectories)
