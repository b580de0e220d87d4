"""Tests of finished episodes: positions, rewards of tokens, segments."""

import dataclasses

import numpy as np
import pytest

from rrl.data.questions import Question
from rrl.data.trajectory import ENVIRONMENT, POLICY, PROMPT, Search, Trajectory
from rrl.rewards.transcript import transcript_of
from rrl.rollout.episodes import EpisodeState, Request

ROLES = np.array([PROMPT, POLICY, POLICY, ENVIRONMENT, POLICY, POLICY, ENVIRONMENT])
ONE = Trajectory(
    question=Question("q7", "?", ("a",)),
    request=0,
    group=0,
    tokens=np.arange(7),
    roles=ROLES,
    logps=np.zeros(7),
    sampled_logps=np.zeros(7),
    turns=np.array([0, 0, 0, 0, 1, 1, 1]),
    segments=[],
    searches=[],
    ended="done",
    rewards={"total": 3.0},
)


def test_positions_restart_in_every_context():
    assert ONE.positions.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert dataclasses.replace(ONE, starts=(0, 3, 4)).positions.tolist() == [0, 1, 2, 0, 0, 1, 2]


def test_the_total_is_paid_at_the_last_policy_token():
    assert ONE.token_rewards.tolist() == [0, 0, 0, 0, 0, 3, 0]


def test_turn_rewards_replace_the_total_and_are_paid_at_the_last_policy_token_of_the_turn():
    by_turn = dataclasses.replace(ONE, turn_rewards={0: 0.5, 1: -1.0})
    assert by_turn.token_rewards.tolist() == [0, 0, 0.5, 0, 0, -1, 0]


def test_a_reward_for_a_turn_without_policy_tokens_is_refused():
    with pytest.raises(ValueError, match=r"'q7': turn 2 has the reward 1\.0 but no policy token"):
        _ = dataclasses.replace(ONE, turn_rewards={2: 1.0}).token_rewards


def test_an_empty_turn_separates_two_segments_of_the_environment():
    """The only token of the turn is the eos token. The observation before it and the correction after it are two segments."""
    state = EpisodeState(Request(ONE.question, np.array([5]), 0), "?")
    one, none = np.array([7]), np.zeros(1, np.float32)
    state.add_policy_turn(one, "<search> x </search>", none, none)
    state.episode.searches.append(Search(0, "x", ("T",)))
    state.add_observation(one, "<observation> T </observation>")
    state.add_policy_turn(one, "", none, none)
    state.add_observation(one, "Write a tag.")
    done = state.trajectory("no_action")
    assert [role for role, _ in done.segments] == [PROMPT, POLICY, ENVIRONMENT, POLICY, ENVIRONMENT]
    assert done.response == ["<search> x </search>", ""]
    found = [
        text for role, text in transcript_of(done, "answer", max_searches=1).segments if role == ENVIRONMENT
    ]
    assert found == ["<observation> T </observation>", "Write a tag."]
