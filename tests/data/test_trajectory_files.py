"""Tests of saving and loading trajectories."""

import dataclasses
import json

import pytest

from rrl.data.passages import Passage
from rrl.data.trajectory import Search
from rrl.data.trajectory_files import load_trajectories, save_trajectories
from rrl.errors import UserError
from tests.eval.fakes import many


def test_texts_searches_and_scores_are_loaded_unchanged(tmp_path):
    written = many(3)
    written[0].searches = [Search.of(0, "q", [Passage("d1", "T", "x")]), Search.of(1, "r", None)]
    written[1].cuts = ((0, "turn_tokens"), (2, "room"))
    save_trajectories(tmp_path / "t.jsonl", written)
    found = load_trajectories(tmp_path / "t.jsonl")
    written[0].searches[0] = dataclasses.replace(written[0].searches[0], passages=())
    for name in ("question", "segments", "searches", "answer", "ended", "cuts", "rewards", "metrics"):
        assert [getattr(t, name) for t in found] == [getattr(t, name) for t in written], name


def test_a_broken_line_is_refused_or_skipped(tmp_path):
    file = tmp_path / "t.jsonl"
    save_trajectories(file, many(2))
    file.write_text(file.read_text() + json.dumps({"question": {"id": "x"}}) + "\n")
    with pytest.raises(UserError, match=r"line 3.*not a trajectory.*trajectories\.jsonl"):
        load_trajectories(file)
    skipped = []
    assert len(load_trajectories(file, "skip", skipped)) == 2 and len(skipped) == 1


def test_older_files_without_ids_are_read(tmp_path):
    file = tmp_path / "t.jsonl"
    save_trajectories(file, many(1))
    record = json.loads(file.read_text())
    del record["question"]["gold_ids"]
    for search in record["searches"]:
        del search["ids"]
    file.write_text(json.dumps(record) + "\n")
    (found,) = load_trajectories(file)
    assert found.question.gold_ids == () and not any(search.ids for search in found.searches)
