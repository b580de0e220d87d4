"""Tests of the shapes of policies."""

import pytest

from rrl.errors import UserError
from rrl.models.config import matrix_parameters
from rrl.plan.policy_shape import policy_shape


def test_a_policy_without_folder_or_published_shape_is_refused():
    with pytest.raises(UserError, match=r"policy='models/Other-1B' is not a Hugging Face folder.*Qwen2.5-7B"):
        policy_shape("models/Other-1B")


@pytest.mark.parametrize(("name", "parameters"), [("gemma-3-1b-it", 1.0e9), ("gemma-3-4b-it", 3.88e9)])
def test_gemma_3_has_a_known_shape(name, parameters):
    config, _ = policy_shape(name)
    count = matrix_parameters(config) + config.vocab_size * config.hidden
    assert count == pytest.approx(parameters, rel=0.01)
