"""Signs of collapse, and the number of steps they must last."""

import numpy as np
import pytest

from rrl.setup.rl_config import GuardConfig
from rrl.train.guard import Guard

WELL = {
    "reward/total": 1.0,
    "train/entropy": 0.5,
    "train/kl": 0.1,
    "train/grad_norm": 1.0,
    "train/not_finite": 0.0,
}


@pytest.mark.parametrize(
    ("sick", "sign"),
    [
        ({"reward/total": 0.0}, "the reward is at most 0 in each step from 3 to 5"),
        ({"train/entropy": 0.0005}, "the entropy is at most 0.001 in each step from 3 to 5"),
        ({"train/kl": 10.5}, "the KL from the reference is above 10 in each step from 3 to 5"),
        ({"train/kl": float("nan")}, "the KL from the reference is above 10 in each step from 3 to 5"),
        ({"train/not_finite": 1.0}, "logits of the policy are not finite in each step from 3 to 5"),
        ({"train/grad_norm": float("inf")}, "no gradient is finite in each step from 3 to 5"),
        (
            {"critic/grad_norm": float("nan")},
            "no gradient of the critic is finite in each step from 3 to 5",
        ),
    ],
)
def test_a_lasting_sign_is_reported_once(sick, sign):
    guard = Guard(GuardConfig(steps=3))
    assert [guard.check(step, WELL) for step in (1, 2)] == ["", ""] and not guard.sees_collapse
    found = [guard.check(step, WELL | sick) for step in range(3, 8)]
    assert found == ["", "", sign, "", ""] and guard.sees_collapse


def test_a_step_without_the_sign_ends_it_and_one_without_the_metric_does_not():
    guard, poor = Guard(GuardConfig(steps=2)), {"train/entropy": 0.0}
    assert guard.check(1, poor) == "" and guard.check(2, {}) == ""
    assert guard.check(3, poor) == "the entropy is at most 0.001 in each step from 1 to 3"
    assert guard.check(4, WELL) == "" and guard.check(5, poor) == ""


def test_simultaneous_signs_are_reported_together():
    guard = Guard(GuardConfig(steps=1))
    assert guard.check(1, {"reward/total": -1.0, "train/kl": 11.0}).count(";") == 1


def test_a_mean_that_differs_from_the_threshold_by_rounding_is_a_sign():
    mean = float(np.mean([-0.7] * 3))
    assert mean > -0.7
    assert Guard(GuardConfig(steps=1, reward=-0.7)).check(1, WELL | {"reward/total": mean})
    assert not Guard(GuardConfig(steps=1, reward=-0.7)).check(1, WELL | {"reward/total": -0.69})


def test_without_a_threshold_the_reward_is_not_checked():
    guard = Guard(GuardConfig(steps=1, reward=None))
    assert guard.check(1, WELL | {"reward/total": -5.0}) == "" and not guard.sees_collapse
    assert guard.check(2, WELL | {"train/entropy": 0.0})


def test_action_off_checks_nothing():
    guard = Guard(GuardConfig("off", steps=1))
    assert guard.check(1, {"reward/total": 0.0}) == "" and not guard.sees_collapse
