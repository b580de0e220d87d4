"""TIRESRAG-R1's shaping functions at values computed by hand from the paper's equations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.errors import UserError
from rrl.recipes.tiresrag_shaping import (
    auxiliary_weight,
    consistency_penalty,
    difficulty_weight,
    saturated,
)

unit = st.floats(0, 1)
normal = st.floats(-3, 3)


def test_auxiliary_weight_has_the_reference_values():
    found = [auxiliary_weight(t, 100) for t in (0, 50, 90, 100)]
    np.testing.assert_allclose(found, [0.999877, 0.982014, 0.5, 0.268941], atol=5e-7)


def test_schedule_variants_are_those_of_the_appendix():
    # G.2: fixed, linear decay, fast decay. Figure 4: fast decay falls early, the paper's schedule late.
    assert [auxiliary_weight(t, 100, "fixed") for t in (0, 99)] == [1, 1]
    assert [auxiliary_weight(t, 100, "linear") for t in (0, 25, 100)] == [1, 0.75, 0]
    assert auxiliary_weight(10, 100, "fast") == 0.5
    assert auxiliary_weight(50, 100, "fast") < 0.02 < 0.98 < auxiliary_weight(50, 100)
    with pytest.raises(
        UserError, match="schedule='slow' is unknown; choose one of paper, fixed, linear, fast"
    ):
        auxiliary_weight(0, 1, "slow")


@given(st.integers(1, 10_000), st.data())
def test_auxiliary_weight_never_increases_and_stays_in_0_to_1(steps, data):
    step = data.draw(st.integers(0, steps - 1))
    for schedule in ("paper", "fixed", "linear", "fast"):
        now, later = (auxiliary_weight(t, steps, schedule) for t in (step, step + 1))
        assert 0 <= later <= now <= 1
        assert auxiliary_weight(step, 0, schedule) == 1  # outside training


def test_difficulty_weight_has_the_reference_values():
    found = difficulty_weight(np.array([0, 0.4, 0.75, 1]))
    np.testing.assert_allclose(found, [1.499392, 1.467757, 0.95, 0.483444], atol=5e-7)


@given(unit, unit)
def test_difficulty_weight_decreases_with_sufficiency_between_b_and_a(one, other):
    low, high = difficulty_weight(np.array(sorted((one, other))))
    assert 0.4 <= high <= low <= 1.5
    assert math.isclose(low, 0.4 + 1.1 / (1 + math.exp(10 * (min(one, other) - 0.75))))


@given(normal, normal, normal)
def test_penalty_is_a_tenth_of_a_negative_product_and_never_negative(sufficient, thinking, answer):
    found = consistency_penalty(*(np.array([x]) for x in (sufficient, thinking, answer)))[0]
    product = sufficient * thinking * answer
    assert found >= 0
    assert math.isclose(found, -0.1 * product if product < 0 else 0.0, abs_tol=1e-12)


def test_groups_stay_only_with_an_f1_above_low_and_an_f1_below_high():
    # all wrong, all right, mixed, all medium, and both bounds, which are exclusive
    answers = [[0, 0.1], [0.9, 1], [0, 1], [0.5, 0.5], [0.1, 0.1], [0.9, 0.9]]
    found = saturated(np.ravel(answers), np.repeat(np.arange(6), 2))
    assert found.tolist() == np.repeat([True, True, False, False, True, True], 2).tolist()


@given(st.lists(unit, min_size=1, max_size=12), st.integers(0, 100))
def test_saturated_equals_a_loop_over_groups(answers, seed):
    groups = np.random.default_rng(seed).integers(0, 4, len(answers))
    found = saturated(np.array(answers), groups)
    for group in set(groups.tolist()):
        members = [a for a, g in zip(answers, groups, strict=True) if g == group]
        assert set(found[groups == group]) == {not (max(members) > 0.1 and min(members) < 0.9)}
