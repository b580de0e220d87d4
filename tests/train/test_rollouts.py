"""Dynamic sampling: rounds of questions until enough groups have something to tell."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rrl.rl.refill import Refill
from rrl.rollout.engine import RolloutStats
from rrl.train import rollouts
from rrl.train.rollouts import sample_rounds


@pytest.fixture
def sample(monkeypatch):
    """`sample_rounds` over rollouts in which the questions that are odd numbers have spread; tells what was asked."""
    asked = []

    def run(engine, params, recipe, questions, *, key, samples, **_):
        asked.append((list(questions), jax.random.key_data(key).tolist()))
        engine.stats = RolloutStats(seconds=1.0, policy_tokens=len(questions))
        return [
            SimpleNamespace(group=group, question=question, rewards={"total": float(sample * (question % 2))})
            for group, question in enumerate(questions)
            for sample in range(samples)
        ]

    monkeypatch.setattr(rollouts, "run_questions", run)
    key = jax.random.key(7)

    def ask(number, count):
        return [10 * number + i for i in range(count)]

    def sampled(refill):
        found = sample_rounds(
            SimpleNamespace(), None, None, ask, refill, key=key, samples=2, temperature=1.0, reader=None
        )
        return found, asked, key

    return sampled


def test_one_round_is_what_was_asked_with_the_steps_own_key(sample):
    found, asked, key = sample(Refill(4, 1))
    assert asked == [([0, 1, 2, 3], jax.random.key_data(key).tolist())]
    assert [t.group for t in found.trajectories] == [0, 0, 1, 1, 2, 2, 3, 3] and found.kept == {1, 3}


def test_further_rounds_ask_for_what_is_missing_under_other_keys_and_groups_of_their_own(sample):
    found, asked, _ = sample(Refill(4, 5))
    questions = [batch for batch, _ in asked]
    assert questions == [
        [0, 1, 2, 3],
        [10, 11, 12, 13],
    ]  # two of four had spread: two are missing, four are asked
    assert len({tuple(key) for _, key in asked}) == 2
    assert [t.group for t in found.trajectories[::2]] == list(range(8))
    kept = [t.question for t in found.trajectories[::2] if t.group in found.kept]
    assert kept == [1, 3, 11, 13]
    assert dataclasses.asdict(found.stats) == dataclasses.asdict(RolloutStats(seconds=2.0, policy_tokens=8))


def test_what_never_has_spread_ends_after_the_rounds_allowed(sample):
    found, asked, _ = sample(Refill(1, 3))  # question 0, 10, 20
    assert len(asked) == 3 and not found.kept and len(found.trajectories) == 6
    assert np.all([t.rewards["total"] == 0 for t in found.trajectories])
