"""Dynamic sampling selects groups with different rewards, at most the target, in a bounded number of rounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.errors import UserError
from rrl.rl.dynamic_sampling import DynamicSampling


def one_round(state, spread, first=0):
    """Adds a round of groups of two; `spread` says which groups have different rewards."""
    names = np.arange(first, first + len(spread))
    rewards = np.array([[0.0, 1.0 if differs else 0.0] for differs in spread])
    return state.after(rewards.ravel(), np.repeat(names, 2))


def test_two_rounds_by_hand():
    state = one_round(
        DynamicSampling(target_groups=3, max_rounds=5), [True, False, False, True, False, False]
    )
    assert (state.selected, state.done) == ((0, 3), False)
    assert state.next_round == 3  # one group is missing, and one in three was selected
    state = one_round(state, [True, True, False], first=6)
    assert (state.selected, state.done, state.next_round, state.rounds, state.sampled) == (
        (0, 3, 6),
        True,
        0,
        2,
        9,
    )


def test_left_out_groups_are_replaced_whatever_their_rewards():
    rewards, groups = np.array([0.0, 1.0, 0.0, 1.0, 0.0, 0.0]), np.repeat([0, 1, 2], 2)
    state = DynamicSampling(target_groups=2, max_rounds=5).after(rewards, groups, left_out=groups == 0)
    assert (state.selected, state.done, state.sampled) == ((1,), False, 3)


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.lists(st.lists(st.booleans(), min_size=1, max_size=8), min_size=4, max_size=4),
)
def test_rounds_are_bounded_and_the_first_groups_with_spread_are_selected(target_groups, max_rounds, spreads):
    state, first, informative = DynamicSampling(target_groups, max_rounds), 0, []
    while not state.done:
        spread = spreads[state.rounds][: state.next_round]
        informative += [first + i for i, differs in enumerate(spread) if differs]
        state = one_round(state, spread, first)
        first += len(spread)
        assert 0 <= state.next_round <= target_groups and (state.next_round > 0) != state.done
    assert state.rounds <= max_rounds
    assert list(state.selected) == informative[:target_groups]


def test_sampling_ends_although_the_policy_never_succeeds():
    state = DynamicSampling(target_groups=2, max_rounds=2)
    assert state.next_round == 2
    state = one_round(one_round(state, [False, False]), [False, False], first=2)
    assert state.done and state.selected == ()


def test_a_target_of_0_groups_is_refused():
    with pytest.raises(UserError, match="target_groups=0 must be at least 1"):
        DynamicSampling(target_groups=0)
