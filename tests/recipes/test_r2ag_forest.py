"""R2AG's forest (Algorithm 1): trees are expanded level by level, pruned to gold, and never twice the same."""

import json

import numpy as np
import pytest

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import Search, Trajectory
from rrl.errors import UserError
from rrl.recipes.r2ag_forest import STOP, Forest, RetrievalTree, pruned

A, B, NOISE = (Passage(name, name, f"text of {name}") for name in ("A", "B", "Noise"))
QUESTIONS = [Question(f"q{i}", f"question {i}", ("x",), gold=("A", "B")) for i in range(6)]


def outcome(node, *found, ended="expanded"):
    """A trajectory that expanded a node and found these passages, one list a query."""
    none = np.zeros(0)
    searches = [Search(0, "q", passages=tuple(some)) for some in found]
    return Trajectory(node, 0, 0, *(none,) * 5, [], searches, ended)


def level(forest, *outcomes):
    """Expands all trees of a level, each to these outcomes; what was asked."""
    asked = []
    while True:
        (node,) = forest.select(0, 0, 1)
        asked.append(node)
        forest.update([outcome(node, *found, ended=ended) for found, ended in outcomes])
        if not forest.now:
            return asked


def test_a_tree_is_pruned_to_the_best_passage_of_each_query_where_it_is_gold():
    node = RetrievalTree.of(QUESTIONS[0], 0, [A])
    assert pruned(node, [[NOISE], [NOISE, B]]).documents == (A,)  # Hit@Top-1
    again = Passage("9", " b ", "another text of the same title")
    assert pruned(node, [[B], [again], [A], []]).documents == (A, B)


def test_each_question_is_asked_once_and_then_what_became_of_it():
    forest = Forest(QUESTIONS, seed=3)
    first = level(forest, ([[A]], "expanded"), ([[B]], "expanded"), ([[A], [NOISE]], "expanded"), ([], STOP))
    assert sorted(node.tree for node in first) == list(range(6))
    assert [node.tree for node in first] != list(range(6))
    assert all(not node.documents and node.text == f"question {node.tree}" for node in first)
    second = level(forest)
    # 4 outcomes of each: with A, with B, with A again, and the empty tree (SPEC.md 4: "and the empty ones")
    assert len(second) == 18 and forest.level == 1
    assert {node.key for node in second} == {
        (tree, frozenset(kept)) for tree in range(6) for kept in (("a",), ("b",), ())
    }


@pytest.mark.parametrize(
    ("found", "ended", "carried"),
    [
        ([[A], [B]], STOP, False),
        ([[A], [B]], "expanded", True),  # complete, but it did not stop
        ([[A]], STOP, True),  # it stopped too early
        ([], "length", True),
    ],
)
def test_a_tree_is_finished_when_all_gold_is_there_and_the_policy_stops(found, ended, carried):
    forest = Forest(QUESTIONS[:1])
    level(forest, (found, ended))
    (node,) = forest.select(0, 0, 9)
    assert forest.level == int(carried)  # else the question is planted anew
    assert len(node.documents) == (len(found) if carried else 0)


def test_a_tree_is_expanded_five_times_and_not_six():
    # SPEC.md 6: "Five expansions, not six."
    forest = Forest(QUESTIONS[:2])
    seen = []
    for _ in range(7):
        level(forest, ([], "expanded"))
        seen.append(forest.level)
    assert seen == [0, 1, 2, 3, 4, 0, 1] and forest.planted == 2


def test_some_questions_are_planted_at_a_time_and_all_in_turn():
    forest = Forest(QUESTIONS, trees=2, expansions=1, seed=1)
    planted = [{node.tree for node in level(forest)} for _ in range(3)]
    assert all(len(trees) == 2 for trees in planted) and set().union(*planted) == set(range(6))


def test_a_forest_continues_from_its_state_as_if_nothing_had_happened():
    def some(forest, steps, found):
        asked = []
        for step in range(steps):
            nodes = forest.select(step, 0, 4)
            asked += nodes
            forest.update([outcome(node, [passage]) for node in nodes for passage in found])
        return asked

    forest, again = Forest(QUESTIONS, seed=5), Forest(QUESTIONS, seed=5)
    some(forest, 3, [A, B])
    assert forest.now and forest.next
    again.restore(json.loads(json.dumps(forest.state)))
    assert again.state == forest.state
    assert some(again, 12, [B, A]) == some(forest, 12, [B, A])
    assert len(json.loads(json.dumps(forest.state))["documents"]) <= 2  # each passage once


def test_a_question_without_gold_passages_is_refused():
    with pytest.raises(UserError, match="'q' names no gold passages"):
        Forest([*QUESTIONS, Question("q", "?", ("x",))])
