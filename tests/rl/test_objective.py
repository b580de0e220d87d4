"""The settings of the objective: refusals, and rows per microbatch."""

import pytest

from rrl.errors import UserError
from rrl.rl.objective import ObjectiveConfig


@pytest.mark.parametrize(
    "wrong",
    [
        {"dual_clip": 0.5},
        {"clip_low": 2.0},
        {"importance_cap": 0.0},
        {"entropy_coef": -1.0},
        {"kl_estimator": "k4"},
        {"kl_in": "prompt"},
        {"aggregation": "median"},
        {"constant_tokens": 0},
        {"epochs": 0},
    ],
    ids=str,
)
def test_an_invalid_field_is_named_with_its_value(wrong):
    ((field, value),) = wrong.items()
    with pytest.raises(UserError, match=rf"objective\.{field}={value!r}"):
        ObjectiveConfig(**wrong)


def test_each_shard_gets_the_same_number_of_rows_and_at_least_one():
    objective = ObjectiveConfig(microbatch_tokens=32768)
    assert (
        objective.rows_per_microbatch(8192),
        objective.rows_per_microbatch(8192, 4),
        objective.rows_per_microbatch(8192, 16),
    ) == (4, 4, 16)
    assert objective.rows_per_microbatch(2048, 3) == 15
