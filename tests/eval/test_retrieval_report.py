"""Retrieval metrics of an index, without a language model."""

import dataclasses

import pytest

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.eval.retrieval_report import retrieval_report
from rrl.retrieval.index import make_retriever

PASSAGES = [
    Passage("p0", "Oslo", "Oslo is the capital of Norway."),
    Passage("p1", "Norway", "Norway is a country in Europe."),
    Passage("p2", "Bergen", "Bergen is a city of Norway."),
    Passage("p3", "Lima", "Lima is the capital of Peru."),
]
CITY = Question("a", "capital of Norway", ("Oslo",), "city", gold=("Oslo",))
BOTH = Question("b", "Oslo, Lima", ("x",), "two", gold=("Oslo", "Lima"))
NONE = Question("c", "zebra", ("x",), "city", gold=("Bergen",))


@pytest.fixture(scope="module")
def retriever():
    return make_retriever(PASSAGES, "bm25")


def test_means_over_all_and_over_groups(retriever):
    found = retrieval_report(retriever, [CITY, BOTH, NONE], [2, 1], by="hops")
    assert found.cuts == (1, 2) and found.left_out == 0
    assert list(found.groups) == ["all", "1 gold", "2 gold"]
    assert found.groups["all"]["questions"] == 3
    assert found.groups["all"]["recall@1"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert found.groups["2 gold"]["recall@2"] == found.groups["2 gold"]["full_recall@2"] == 1
    assert found.groups["1 gold"]["hits@2"] == 0.5
    assert found.by == "gold titles"


def test_hops_that_the_file_has_are_the_groups(retriever):
    found = retrieval_report(retriever, [dataclasses.replace(CITY, hops=3), BOTH], [1], by="hops")
    assert list(found.groups) == ["all", "2 gold", "3 hops"]


def test_questions_without_gold_passages_are_left_out_and_counted(retriever):
    found = retrieval_report(retriever, [CITY, dataclasses.replace(NONE, gold=())], [1])
    assert (
        found.left_out == 1 and found.groups["all"] == retrieval_report(retriever, [CITY], [1]).groups["all"]
    )
    assert "1 questions without gold passages are left out" in found.as_text()


def test_where_no_question_has_gold_passages_answers_in_the_text_count(retriever):
    found = retrieval_report(retriever, [dataclasses.replace(CITY, gold=())], [1, 4], by="kind")
    assert found.by == "answers in title and text" and found.groups["city"]["recall@1"] == 1
    assert found.as_text().splitlines()[1].split() == ["all", "1", "1", *["100.0"] * 5]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"questions": []}, "no question"),
        ({"cuts": [0]}, "1 or more"),
        ({"cuts": []}, "1 or more"),
        ({"by": "x"}, "kind, hops"),
    ],
)
def test_wrong_input_is_named(retriever, options, words):
    with pytest.raises(UserError, match=words):
        retrieval_report(retriever, **{"questions": [CITY], "cuts": [1], **options})
