"""R2AG's forest (Algorithm 1): trees are expanded level by level, pruned to gold documents, and distinct."""

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
    """Return a trajectory that expanded a tree and found these passages, one list per query."""
    none = np.zeros(0)
    searches = [Search(0, "q", passages=tuple(some)) for some in found]
    return Trajectory(node, 0, 0, *(none,) * 5, [], searches, ended)


def level(forest, *outcomes):
    """Expand all trees of a level with these outcomes each, and return the trees."""
    trees = []
    while True:
        (node,) = forest.select(0, 0, 1)
        trees.append(node)
        forest.update([outcome(node, *found, ended=ended) for found, ended in outcomes])
        if not forest.current:
            return trees


def test_pruning_keeps_the_top_passage_of_each_query_if_it_is_gold():
    node = RetrievalTree.of(QUESTIONS[0], 0, [A])
    assert pruned(node, [[NOISE], [NOISE, B]]).documents == (A,)  # Hit@Top-1
    again = Passage("9", " b ", "another text of the same title")
    assert pruned(node, [[B], [again], [A], []]).documents == (A, B)


def test_first_level_has_each_question_and_later_levels_the_distinct_grown_trees():
    forest = Forest(QUESTIONS, seed=3)
    first = level(forest, ([[A]], "expanded"), ([[B]], "expanded"), ([[A], [NOISE]], "expanded"), ([], STOP))
    assert sorted(node.tree for node in first) == list(range(6))
    assert [node.tree for node in first] != list(range(6))
    assert all(not node.documents and node.text == f"question {node.tree}" for node in first)
    second = level(forest)
    # four outcomes per tree: with A, with B, with A again, and the empty tree
    assert len(second) == 18 and forest.level == 1
    assert {node.key for node in second} == {
        (tree, frozenset(titles)) for tree in range(6) for titles in (("a",), ("b",), ())
    }


@pytest.mark.parametrize(
    ("found", "ended", "carried"),
    [
        ([[A], [B]], STOP, False),
        ([[A], [B]], "expanded", True),  # complete, but no stop signal
        ([[A]], STOP, True),  # stopped too early
        ([], "length", True),
    ],
)
def test_a_tree_is_finished_if_it_has_all_gold_and_the_policy_stops(found, ended, carried):
    forest = Forest(QUESTIONS[:1])
    level(forest, (found, ended))
    (node,) = forest.select(0, 0, 9)
    assert forest.level == int(carried)  # otherwise the question starts again
    assert len(node.documents) == (len(found) if carried else 0)


def test_a_tree_is_expanded_five_times():
    # Algorithm 1 loops while j <= 5, which would be six expansions; B.2 says five
    forest = Forest(QUESTIONS[:2])
    seen = []
    for _ in range(7):
        level(forest, ([], "expanded"))
        seen.append(forest.level)
    assert seen == [0, 1, 2, 3, 4, 0, 1] and forest.rounds == 2


def test_questions_start_in_turn_if_few_trees_grow_at_a_time():
    forest = Forest(QUESTIONS, trees=2, expansions=1, seed=1)
    rounds = [{node.tree for node in level(forest)} for _ in range(3)]
    assert all(len(trees) == 2 for trees in rounds) and set().union(*rounds) == set(range(6))


def test_a_restored_forest_continues_identically():
    def run(forest, steps, found):
        trees = []
        for step in range(steps):
            nodes = forest.select(step, 0, 4)
            trees += nodes
            forest.update([outcome(node, [passage]) for node in nodes for passage in found])
        return trees

    forest, again = Forest(QUESTIONS, seed=5), Forest(QUESTIONS, seed=5)
    run(forest, 3, [A, B])
    assert forest.current and forest.next
    again.restore(json.loads(json.dumps(forest.state)))
    assert again.state == forest.state
    assert run(again, 12, [B, A]) == run(forest, 12, [B, A])
    assert len(json.loads(json.dumps(forest.state))["documents"]) <= 2  # each passage is stored once


def test_a_question_without_gold_passages_is_refused():
    with pytest.raises(UserError, match="'q' names no gold passages"):
        Forest([*QUESTIONS, Question("q", "?", ("x",))])
