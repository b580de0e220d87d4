"""Wrong fields of the sections `train` and `guard` are refused."""

import pytest

from rrl.errors import UserError
from rrl.rl.critic import CriticConfig
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig
from rrl.setup.rl_config import GuardConfig, RLConfig


@pytest.mark.parametrize(
    "wrong",
    [{"action": "halt"}, {"steps": 0}, {"kl": -1.0}, {"entropy": float("nan")}, {"reward": float("nan")}],
)
def test_thresholds_of_the_guard_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match=rf"^guard\.{next(iter(wrong))}="):
        GuardConfig(**wrong)


@pytest.mark.parametrize("wrong", [(100,), (100, 0), (100, 101), (100, 20, 1)])
def test_a_wrong_overlong_setting_is_refused(wrong):
    with pytest.raises(UserError, match=r"train\.overlong=.*longest, cache"):
        RLConfig(2, OptimConfig(), ObjectiveConfig(), overlong=wrong)


@pytest.mark.parametrize(("spread", "rounds"), [(0.0, 1), (None, 2)])
def test_dropping_groups_with_one_sample_per_group_is_refused(spread, rounds):
    objective = ObjectiveConfig(drop_spread=spread)
    with pytest.raises(UserError, match=r"train\.samples=1 .* every group would be dropped"):
        RLConfig(2, OptimConfig(), objective, samples=1, rounds=rounds)
    RLConfig(2, OptimConfig(), ObjectiveConfig(), samples=1)


@pytest.mark.parametrize("temperatures", [(0.5,), (0.1, -0.1), (0.1, 0.2, 0.3)])
def test_temperatures_that_do_not_fit_the_samples_are_refused(temperatures):
    with pytest.raises(UserError, match=r"train\.temperatures=.* must be 2 numbers of at least 0"):
        RLConfig(2, OptimConfig(), ObjectiveConfig(), samples=2, temperatures=temperatures)


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_average_last_outside_0_to_1_is_refused(share):
    with pytest.raises(UserError, match=rf"train.average_last={share} must lie in 0..1"):
        RLConfig(4, OptimConfig(), ObjectiveConfig(), average_last=share)


def test_a_critic_warmup_longer_than_the_run_is_refused():
    critic = CriticConfig(OptimConfig(total_steps=4), warmup_steps=5)
    with pytest.raises(UserError, match=r"train\.steps=4 must be at least critic\.warmup_steps=5"):
        RLConfig(4, OptimConfig(), ObjectiveConfig(), critic=critic)
