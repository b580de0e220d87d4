"""Saved batches with non-finite gradients: their content, their number, and one writing process."""

import json

import jax
import numpy as np

from rrl.train.dump import MAX_FILES, dump_batch
from tests.eval.fakes import many


def test_a_saved_batch_has_all_tokens_rewards_and_advantages(tmp_path):
    trajectories = many(3)
    advantages = [1.0, np.full(len(trajectories[1].tokens), np.nan), -1.0]
    found = np.load(dump_batch(tmp_path, 7, trajectories, advantages))
    ends = np.cumsum(found["lengths"])
    for t, end, advantage in zip(trajectories, ends, advantages, strict=True):
        part = slice(end - len(t.tokens), end)
        np.testing.assert_array_equal(found["tokens"][part], t.tokens)
        np.testing.assert_array_equal(found["logps"][part], t.logps)
        np.testing.assert_array_equal(found["rewards"][part], t.token_rewards)
        np.testing.assert_array_equal(found["advantages"][part], np.broadcast_to(advantage, len(t.tokens)))
    assert [one["rewards"] for one in json.loads(str(found["about"]))] == [t.rewards for t in trajectories]


def test_the_number_of_saved_batches_is_limited(tmp_path):
    files = [dump_batch(tmp_path, step, many(1), [0.0]) for step in range(MAX_FILES + 2)]
    assert [file is None for file in files] == [False] * MAX_FILES + [True] * 2
    assert len(list(tmp_path.iterdir())) == MAX_FILES


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert dump_batch(tmp_path / "not_finite", 1, many(1), [0.0]) is None
    assert not (tmp_path / "not_finite").exists()
