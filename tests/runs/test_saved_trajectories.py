"""Trajectories for the final report are restored exactly."""

import dataclasses

import numpy as np
import pytest

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import Search
from rrl.errors import UserError
from rrl.recipes.r2ag_forest import RetrievalTree
from rrl.runs.saved_trajectories import MAX_PER_SOURCE, SavedTrajectories, as_json, from_json
from tests.eval.fakes import many


def rich():
    """Return a trajectory with a value in every field that a recipe may set."""
    (trajectory, *_) = many(1)
    found = (Passage("7", "Velden", 'A "harbour".\n\u2028\ud800'),)
    return dataclasses.replace(
        trajectory,
        searches=[Search(0, "Velden?", ("Velden",), False, found), Search(1, "", failed=True)],
        starts=(0, 5),
        cuts=((0, "turn_tokens"),),
        turn_rewards={0: 0.1, 2: np.float32(0.3)},
        rewards={"total": np.float64(0.7), "answer": 1, "lost": float("nan")},
    )


def same(a, b) -> bool:
    """Return whether two trajectories are equal in all fields, including dtypes and tuple types."""
    for field in dataclasses.fields(a):
        one, two = getattr(a, field.name), getattr(b, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == two.dtype, field.name
            np.testing.assert_array_equal(one, two)
        else:
            assert repr(one) == repr(two) or one == two, field.name
    return True


def test_a_trajectory_is_restored_with_every_field(tmp_path):
    saved, trajectory = SavedTrajectories(tmp_path), rich()
    saved.save_evaluated(4, [trajectory])
    (back,) = saved.load_evaluated(4)
    expected = dataclasses.replace(
        trajectory,
        turn_rewards={0: 0.1, 2: float(np.float32(0.3))},
        rewards={"total": 0.7, "answer": 1, "lost": float("nan")},
    )
    assert same(back, expected)
    assert same(from_json(as_json(back)), expected)


def test_the_tree_of_a_curriculum_is_restored_as_its_question(tmp_path):
    saved, trajectory = SavedTrajectories(tmp_path), rich()
    tree = RetrievalTree.of(trajectory.question, 3, (Passage("7", "Velden", "A harbour."),))
    saved.save_sampled(4, [dataclasses.replace(trajectory, question=tree)], np.array([False]))
    ((back,), _) = saved.load_sampled(4)
    assert type(back.question) is Question and back.question == trajectory.question


def test_only_trajectories_of_the_requested_step_are_restored(tmp_path):
    saved, trajectories = SavedTrajectories(tmp_path), many(3)
    assert saved.load_evaluated(2) == [] and saved.load_sampled(2)[0] == []
    saved.save_evaluated(2, trajectories[:1])
    saved.save_sampled(3, trajectories[1:], np.array([True, False]))
    assert (
        saved.load_evaluated(3) == []
        and saved.load_sampled(2)[0] == []
        and len(saved.load_sampled(2)[1]) == 0
    )
    sampled, left_out = saved.load_sampled(3)
    assert all(same(a, b) for a, b in zip(sampled, trajectories[1:], strict=True))
    assert left_out.dtype == bool and left_out.tolist() == [True, False]


def test_only_the_trajectories_on_the_page_keep_their_tokens(tmp_path):
    saved, trajectories = SavedTrajectories(tmp_path), many(MAX_PER_SOURCE + 2)
    saved.save_evaluated(1, trajectories)
    saved.save_sampled(1, trajectories, np.zeros(MAX_PER_SOURCE + 2, bool))
    back, (sampled, left_out) = saved.load_evaluated(1), saved.load_sampled(1)
    assert len(back) == MAX_PER_SOURCE + 2 and len(sampled) == len(left_out) == MAX_PER_SOURCE
    assert [len(t.tokens) > 0 for t in back] == [True] * MAX_PER_SOURCE + [False] * 2
    assert back[-1].segments == trajectories[-1].segments


@pytest.mark.parametrize("damage", [b"\xff\n", b"5\n", b'{"step": 1}\n{"question": 1}\n'])
def test_the_error_for_a_damaged_file_names_it(tmp_path, damage):
    saved = SavedTrajectories(tmp_path)
    saved.save_evaluated(1, [])
    (tmp_path / "report" / "evaluated.jsonl").write_bytes(damage)
    with pytest.raises(UserError, match=r"evaluated\.jsonl.*; remove that file"):
        saved.load_evaluated(1)
