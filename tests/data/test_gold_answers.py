"""Tests of gold answers in published formats: several, typed, separate, unanswerable."""

import json
from pathlib import Path

import pytest

from rrl.data.questions import Question, load_questions
from rrl.errors import UserError
from tests.data.question_files import written


def test_answers_are_read_from_a_separate_file(tmp_path: Path) -> None:
    file, truth = tmp_path / "queries.json", tmp_path / "truth.json"
    file.write_text(
        json.dumps({"queries": [{"id": "0", "question": "Who?"}, {"id": "1", "question": "What?"}]})
    )
    truth.write_text(
        json.dumps({"1": {"answer": "B"}, "0": {"answer": "A", "evidence_list": [{"title": "T"}]}})
    )
    assert load_questions(file, truth=truth) == [
        Question("0", "Who?", ("A",), gold=("T",)),
        Question("1", "What?", ("B",)),
    ]
    truth.write_text(json.dumps({"1": {"answer": "B"}}))
    with pytest.raises(UserError, match=r"queries.json, record 1: id: '0' has no answer in .*truth.json"):
        load_questions(file, truth=truth)
    truth.write_text('[{"id": 1}, {"id": "1"}]')
    with pytest.raises(UserError, match=r"truth.json, record 2: id: '1' occurs twice"):
        load_questions(file, truth=truth)
    truth.write_text("[3]")
    with pytest.raises(UserError, match=r"truth.json, record 1: got 3, not an object"):
        load_questions(file, truth=truth)


def test_the_gold_answer_of_a_multiple_choice_is_one_of_its_choices(tmp_path: Path) -> None:
    record = {"question": "Which?", "choices": ["Oslo", "Rome"]}
    file = written(tmp_path, *(record | {"answer": answer} for answer in ("B", "b", "Rome", [1])))
    assert [question.answers for question in load_questions(file)] == [("B",)] * 4
    for wrong in ("C", "rom", [2]):
        with pytest.raises(
            UserError, match=r"line 1: answer: got ('2'|'C', neither a letter from A to B|'rom')"
        ):
            load_questions(written(tmp_path, record | {"answer": wrong}))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"qid": "s", "question": "Is it?", "answer": True}, Question("s", "Is it?", ("yes",))),
        ({"qid": "s", "question": "Is it?", "answer": False}, Question("s", "Is it?", ("no",))),
        ({"id": "n", "question": "When?", "answer": 1913}, Question("n", "When?", ("1913",))),
        (
            {"id": "n", "question": "How?", "answers": ["nine", 9, 9.5, 9.0]},
            Question("n", "How?", ("nine", "9", "9.5")),
        ),
        (
            {
                "id": "q",
                "title": "T",
                "context": "x",
                "question": "Who?",
                "answers": {"text": ["A", "B"], "answer_start": [0]},
            },
            Question("q", "Who?", ("A", "B")),
        ),
        (
            {
                "id": "k",
                "input": "Who?",
                "output": [
                    {"answer": "A"},
                    {"answer": "B"},
                    {"provenance": [{"wikipedia_id": "1", "title": "T"}]},
                ],
            },
            Question("k", "Who?", ("A", "B"), gold=("T",), gold_ids=("1",)),
        ),
        ({"_id": "l", "input": "Who?", "context": "x", "answers": ["A"]}, Question("l", "Who?", ("A",))),
        (
            {
                "question": "Who?",
                "contexts": [{"title": "T", "text": "x", "is_supporting": True}],
                "reference": ["A"],
            },
            Question("0", "Who?", ("A",), gold=("T",)),
        ),
        (
            {"_id": "h", "question": "Who?", "answer": "A", "supporting_facts": '[["T", 0], ["U", 1]]'},
            Question("h", "Who?", ("A",), gold=("T", "U")),
        ),
        ({"query_id": "7", "query": "Who?", "answer": "A", "gold_docs": [{}]}, Question("7", "Who?", ("A",))),
        ({"question": "Who?", "answers": ["A", None]}, Question("0", "Who?", ("A",))),
        ({"input": "Who?", "output": [{"answer": None}, {"answer": "A"}]}, Question("0", "Who?", ("A",))),
        ({"question": "Who?", "answers": "['A', 'B']"}, Question("0", "Who?", ("A", "B"))),
        ({"question": "Who?", "answer": "[A]"}, Question("0", "Who?", ("[A]",))),
        (
            {"question": "Is it?", "choices": ["no", "yes"], "answer": False},
            Question("0", "Is it?", ("A",), choices=("no", "yes")),
        ),
    ],
)
def test_answers_are_read_in_every_published_format(tmp_path: Path, record: dict, expected: Question) -> None:
    assert load_questions(written(tmp_path, record)) == [expected]


UNANSWERABLE = [
    {"id": "2hop__1_2", "question": "Who?", "answer": "A", "answerable": False},
    {"id": "s", "question": "Who?", "answers": {"text": [], "answer_start": []}},
    {"id": "s", "question": "Who?", "answers": [], "is_impossible": True},
    {"id": "s", "question": "Who?", "answer": "A", "answerable": "no"},
    {"id": "s", "question": "Who?", "answer": "A", "is_impossible": "1.0"},
]


@pytest.mark.parametrize("record", UNANSWERABLE)
def test_unanswerable_questions_are_excluded_and_counted(tmp_path: Path, record: dict, caplog) -> None:
    file = written(tmp_path, {"id": "a", "question": "Who?", "answer": "A", "answerable": True}, record)
    assert [question.id for question in load_questions(file)] == ["a"]
    assert "excluded 1 records of 2 (line 2: its publisher marks it as unanswerable)" in caplog.text
    assert [question.answers for question in load_questions(file, unanswerable="empty")] == [("A",), ("",)]
    assert [question.answers for question in load_questions(file, answers_optional=True)] == [("A",), ()]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (("True", "false"), ("yes", "no")),  # StrategyQA as a table
        (("True", "a lie"), ("True", "a lie")),
        (("True", "true"), ("True", "true")),
    ],
)
def test_booleans_of_a_table_are_yes_and_no_as_in_json(tmp_path: Path, answers, expected) -> None:
    file = tmp_path / "strategy.csv"
    rows = "".join(f"{number},Is it {number}?,{answer}\n" for number, answer in enumerate(answers))
    file.write_text("id,question,answer\n" + rows, encoding="utf-8")
    assert [question.answers for question in load_questions(file)] == [(answer,) for answer in expected]
