"""Coverage of gold passages, against loops over the definitions and R2AG's published numbers."""

import random

import numpy as np
import pytest

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.retrieval.gold import IDS, TITLES, gold_efficiency, gold_hits, hits_by_answer, hits_by_key


def loops(found: list[str], gold: set[str], k: int) -> dict[str, float]:
    """Compute the metrics of one question in a loop over its passages."""
    seen: list[str] = []
    for name in found:
        if name not in seen:
            seen.append(name)
    seen = seen[:k]
    right, precisions, first = 0, 0.0, 0.0
    for rank, name in enumerate(seen, 1):
        if name in gold:
            right += 1
            precisions += right / rank
            first = first or 1 / rank
    return {
        "recall": right / len(gold),
        "full_recall": float(right == len(gold)),
        "average_precision": precisions / len(gold),
        "hit": float(right > 0),
        "reciprocal_rank": first,
    }


def test_every_metric_equals_its_definition_on_random_rankings() -> None:
    draw = random.Random(0)
    names = [f"p{i}" for i in range(12)]
    found = [draw.choices(names, k=draw.randrange(9)) for _ in range(300)]
    gold = [draw.sample(names, draw.randrange(1, 5)) for _ in range(300)]
    hits = gold_hits(found, gold)
    for k in (1, 3, 99):
        expected = [loops(names, set(want), k) for names, want in zip(found, gold)]
        for metric in expected[0]:
            np.testing.assert_allclose(
                getattr(hits, metric)(k), [row[metric] for row in expected], err_msg=metric
            )
    np.testing.assert_array_equal(hits.retrieved, [len(set(names)) for names in found])
    report = hits.report((2,))
    assert report["recall@2"] == pytest.approx(np.mean(hits.recall(2)))
    assert report["recall"] == pytest.approx(np.mean(hits.recall()))
    assert report["passages"] == pytest.approx(np.mean(hits.retrieved))


def test_metrics_equal_a_worked_example() -> None:
    hits = gold_hits([["A", "x", " a ", "B", "y"]], [["a", "B", "C", "b"]])
    assert hits.retrieved.tolist() == [4] and hits.gold.tolist() == [3]  # A and B count once each
    assert hits.recall().item() == pytest.approx(2 / 3)
    assert hits.average_precision().item() == pytest.approx((1 + 2 / 3) / 3)
    assert hits.recall(1).item() == pytest.approx(1 / 3)
    assert hits.full_recall().item() == 0


def test_questions_without_gold_passages_are_left_out_of_means() -> None:
    hits = gold_hits([["A"], ["A"], []], [["A"], [], ["B"]])
    assert np.isnan(hits.recall()).tolist() == [False, True, False]
    assert hits.report()["recall"] == 0.5
    assert hits.report()["passages"] == 0.5
    assert hits.report()["eta_re"] == gold_efficiency(
        0.5, 0.5, 1.0
    )  # its oracle leaves out the other questions too
    assert gold_hits([["A"]], [[]]).report() == {}
    assert gold_hits([[]], [["A"]]).report()["mrr"] == 0
    assert gold_hits([], []).report() == {}


@pytest.mark.parametrize(
    ("recall", "passages", "expected"),
    [
        (97.58, 4.477, 87.18),
        (98.48, 8.11, 48.57),
        (97.32, 5.779, 67.36),
        (97.35, 6.281, 62.0),
        (98.58, 11.793, 33.44),
        (97.55, 7.227, 53.99),
        (98.4, 10.993, 35.8),
        (98.4, 13.599, 28.94),
    ],
)
def test_gold_efficiency_reproduces_table_a6(recall: float, passages: float, expected: float) -> None:
    """R2AG, Table A.6, all rows; its oracle finds 4 passages."""
    assert 100 * gold_efficiency(recall / 100, passages, 4) == pytest.approx(expected, abs=0.04)


def test_hits_by_answer_count_the_first_passage_with_an_answer() -> None:
    found = [["about Rome", "in Paris, France", "Paris"], ["x", "x", "the art"], []]
    hits = hits_by_answer(found, [["Lyon", "Paris"], ["art"], ["y"]])
    np.testing.assert_allclose(hits.reciprocal_rank(), [1 / 2, 1 / 2, 0])
    assert hits.hit(1).tolist() == [0, 0, 0]
    assert hits.recall().tolist() == [1, 1, 0]


def test_ids_are_case_sensitive_and_titles_are_not() -> None:
    question = Question("q", "Who?", ("A",), gold=("Oslo",), gold_ids=("aB",))
    for key, recall in ((IDS, 0), (TITLES, 1)):
        assert hits_by_key(key, [["AB"]], [["OSLO"]], [question]).recall().tolist() == [recall]


def test_wrong_arguments_are_rejected() -> None:
    with pytest.raises(UserError, match=r"cutoffs=\[0\]: each must be 1 or more"):
        gold_hits([["A"]], [["A"]]).report((0,))
    with pytest.raises(ValueError):
        gold_hits([["A"]], [])
