"""Tests of the shapes of policies."""

import pytest

from rrl.errors import UserError
from rrl.plan.policy_shape import policy_shape


def test_a_policy_without_folder_or_published_shape_is_refused():
    with pytest.raises(UserError, match=r"policy='models/Other-1B' is not a Hugging Face folder.*Qwen2.5-7B"):
        policy_shape("models/Other-1B")
