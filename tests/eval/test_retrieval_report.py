"""Retrieval metrics of an index, measured without a language model."""

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


def test_metrics_are_means_over_all_questions_and_over_groups(retriever):
    found = retrieval_report(retriever, [CITY, BOTH, NONE], [2, 1], by="hops")
    assert found.cuts == (1, 2) and found.left_out == 0
    assert list(found.groups) == ["all", "1 gold", "2 gold"]
    assert found.groups["all"]["questions"] == 3
    assert found.groups["all"]["recall@1"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert found.groups["2 gold"]["recall@2"] == found.groups["2 gold"]["full_recall@2"] == 1
    assert found.groups["1 gold"]["hits@2"] == 0.5
    assert found.matched_by == "gold titles"


def test_hops_of_the_file_are_the_groups(retriever):
    found = retrieval_report(retriever, [dataclasses.replace(CITY, hops=3), BOTH], [1], by="hops")
    assert list(found.groups) == ["all", "2 gold", "3 hops"]


def test_questions_without_gold_passages_are_left_out_and_counted(retriever):
    found = retrieval_report(retriever, [CITY, dataclasses.replace(NONE, gold=())], [1])
    assert (
        found.left_out == 1 and found.groups["all"] == retrieval_report(retriever, [CITY], [1]).groups["all"]
    )
    assert "1 questions without gold titles are left out" in found.as_text()


def test_the_text_names_what_the_left_out_questions_lack(retriever):
    by_id = dataclasses.replace(CITY, gold=(), gold_ids=("p0",))
    found = retrieval_report(retriever, [by_id, BOTH], [1])
    assert found.left_out == 1 and "1 questions without gold ids are left out" in found.as_text()
    answered, unanswered = (dataclasses.replace(CITY, gold=(), answers=given) for given in (("Oslo",), ()))
    found = retrieval_report(retriever, [answered, unanswered], [1])
    assert found.left_out == 1 and "1 questions without answers are left out" in found.as_text()


def test_without_gold_passages_answers_in_the_text_count(retriever):
    found = retrieval_report(retriever, [dataclasses.replace(CITY, gold=())], [1, 4], by="kind")
    assert found.matched_by == "answers in title and text" and found.groups["city"]["recall@1"] == 1
    assert found.as_text().splitlines()[1].split() == ["all", "1", "1", *["100.0"] * 5]


TWICE = [Passage("a", "Norway", "Oslo, capital"), Passage("b", "Norway", "Bergen, port"), PASSAGES[3]]
"""Two passages share a title."""


def test_ids_distinguish_passages_with_the_same_title():
    retriever = make_retriever(TWICE, "bm25")
    question = Question("q", "Bergen port", ("x",), gold=("Norway",), gold_ids=("a",))
    found = retrieval_report(retriever, [question], [1])
    assert found.matched_by == "gold ids" and found.groups["all"]["recall@1"] == 0
    assert found.as_text().splitlines()[-1].endswith("By gold ids.")
    by_title = retrieval_report(retriever, [dataclasses.replace(question, gold_ids=())], [1])
    assert by_title.matched_by == "gold titles" and by_title.groups["all"]["recall@1"] == 1
    assert by_title.as_text().splitlines()[-1].endswith("By gold titles.")


def test_metrics_at_k_do_not_depend_on_the_other_cuts():
    """Two passages share the title that ranks first; the gold one is the third."""
    passages = [
        Passage("a", "N", "oslo oslo"),
        Passage("b", "N", "oslo oslo rain"),
        Passage("c", "M", "oslo sun sky"),
    ]
    question = Question("q", "oslo", ("x",), gold=("M",))
    for cuts in ([2], [2, 3]):
        found = retrieval_report(make_retriever(passages, "bm25"), [question], cuts).groups["all"]
        assert found["recall@2"] == 0 and found.get("mrr@3", 1 / 3) == pytest.approx(1 / 3)


def test_a_gold_id_in_the_index_that_is_not_retrieved_counts_as_missed(retriever):
    question = Question("q", "Lima Peru", ("x",), gold_ids=("p0",))
    found = retrieval_report(retriever, [question], [1])
    assert (found.matched_by, found.warning, found.groups["all"]["recall@1"]) == ("gold ids", "", 0)


@pytest.mark.parametrize("other", ["z9", "p3"])
def test_ids_of_another_corpus_give_a_warning_and_titles_are_used(retriever, other):
    """p3 is in the index, but as the id of another passage than the question's gold passage."""
    found = retrieval_report(retriever, [dataclasses.replace(CITY, gold_ids=(other,))], [1])
    assert found.matched_by == "gold titles" and found.groups["all"]["recall@1"] == 1
    assert f"'{other}', and a gold title of the same question" in found.as_text().splitlines()[-1]


def test_ids_of_another_corpus_without_titles_are_rejected(retriever):
    with pytest.raises(UserError, match="no passage has one of the gold ids, such as 'z9'"):
        retrieval_report(retriever, [dataclasses.replace(CITY, gold=(), gold_ids=("z9",))], [1])


def test_questions_without_answers_and_gold_passages_are_rejected(retriever):
    with pytest.raises(UserError, match="no question has gold ids, gold titles or answers"):
        retrieval_report(retriever, [dataclasses.replace(CITY, gold=(), answers=())], [1])


def test_titles_are_used_if_more_questions_have_them(retriever):
    some = [dataclasses.replace(CITY, gold_ids=("p0",)), BOTH]
    found = retrieval_report(retriever, some, [1])
    assert (
        found.matched_by == "gold titles"
        and "only 1 questions have gold ids, 2 have gold titles" in found.as_text()
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"questions": []}, "no question"),
        ({"cuts": [0]}, "1 or more"),
        ({"cuts": []}, "1 or more"),
        ({"by": "x"}, "kind, hops"),
    ],
)
def test_errors_name_the_wrong_input(retriever, options, words):
    with pytest.raises(UserError, match=words):
        retrieval_report(retriever, **{"questions": [CITY], "cuts": [1], **options})
