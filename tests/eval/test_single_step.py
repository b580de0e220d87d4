"""Step-wise and single-step retrieval are compared at the same number of passages, counted by hand."""

import numpy as np
import pytest

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import Search, Trajectory
from rrl.errors import UserError
from rrl.eval.single_step import as_text, compare_single_step
from rrl.retrieval.retriever import Hit


class Shelf:
    """A retriever that returns these titles for every question, best first."""

    def search(self, queries, k):
        self.k = k
        return [[Hit(Passage(t, t, ""), 1.0) for t in ("A", "A", "X", "B", "Y")[:k]] for _ in queries]


def found(kind, gold, *searches):
    none = np.zeros(0)
    question = Question("q", "?", ("x",), kind, gold)
    return Trajectory(question, 0, 0, *(none,) * 5, [], [Search(0, "q", t) for t in searches], "stop")


SOME = [
    found("one", ("A", "B"), ("A",), ("A", "B")),  # 2 documents: A, B; the question finds A, X
    found("two", ("A", "B"), ("A",), ("X",), ("Z",), ("W",)),  # 4: the question finds A, X, B, ...
    found("two", ("C",), ("C",)),  # 1
    found("two", (), ("C",)),  # no gold: not counted
]


def test_both_methods_retrieve_the_same_number_of_passages():
    shelf = Shelf()
    comparison = compare_single_step(SOME, shelf)
    assert comparison.step_wise.retrieved.tolist() == [2, 4, 1] and comparison.k == 3  # 7 / 3, rounded up
    assert comparison.step_wise.recall().tolist() == [1, 0.5, 1]
    assert comparison.single_same_k.retrieved.tolist() == [2, 4, 1]  # distinct passages
    assert comparison.single_same_k.recall().tolist() == [0.5, 1, 0]
    assert comparison.single_mean_k.recall().tolist() == [1, 1, 0]
    assert comparison.gain.difference == pytest.approx(1 / 3) and comparison.gain.better == 2


def test_the_table_shows_counts_and_the_interval():
    lines = as_text(compare_single_step(SOME, Shelf())).splitlines()
    assert lines[0].endswith("(3 questions)")
    row = next(line for line in lines if line.startswith("all")).split()
    assert row[1:] == ["2.33", "83.3", "66.7", "50.0", "33.3", "66.7", "66.7"]
    assert [line.split()[0] for line in lines if line.startswith(("one", "two"))] == ["one", "two"]
    assert "at equal K: +33.3 points, 95 % interval" in lines[-1]


def test_a_comparison_without_gold_titles_is_rejected():
    with pytest.raises(UserError, match="none of the questions of 1 trajectories has gold titles"):
        compare_single_step(SOME[3:], Shelf())
