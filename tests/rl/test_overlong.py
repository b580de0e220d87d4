"""DAPO's soft penalty for long outputs equals the paper's formula."""

import numpy as np
import pytest

from rrl.errors import UserError
from rrl.rl.overlong import overlong_penalty


def test_the_penalty_equals_dapos_eq_13():
    # Eq. 13 with L_max = 100 and L_cache = 20, case by case
    def by_hand(length):
        return 0.0 if length <= 80 else (80 - length) / 20 if length <= 100 else -1.0

    lengths = np.array([0, 80, 81, 90, 100, 101, 500])
    np.testing.assert_allclose(overlong_penalty(lengths, 100, 20), [by_hand(n) for n in lengths])
    with pytest.raises(UserError, match=r"cache=0 must lie in 1\.\.longest=100"):
        overlong_penalty(lengths, 100, 0)
