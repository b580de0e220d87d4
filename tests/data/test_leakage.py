"""Tests of finding questions that two files share, in any case and punctuation."""

import json
from pathlib import Path

import pytest

from rrl.data.leakage import shared_questions
from rrl.data.questions import Question, load_questions
from tests.shared_data import shared


def test_shared_questions_are_found_by_normalised_text() -> None:
    train = [
        Question("a", "Who wrote the well-known “Emma”?", ("Jane Austen",)),
        Question("b", "who wrote the well known 'Emma'", ("x",)),
        Question("c", "?!", ("x",)),
        Question("d", "Where is it?", ("The Alps",)),
    ]
    held_out = [
        Question("1", "Where is it", ("alps", "y")),
        Question("2", "...", ("x",)),
        Question("3", "Where is he?", ("x",)),
        Question("4", "Where is it?", ("z",)),
    ]
    leaks = shared_questions(train, held_out)
    assert [(leak.train.id, leak.held_out.id, leak.same_answer) for leak in leaks] == [
        ("d", "1", True),
        ("d", "4", False),
    ]
    emma = [Question("5", "Who wrote well known Emma?", ("Jane austen",))]
    assert [(leak.train.id, leak.same_answer) for leak in shared_questions(train, emma)] == [("a", True)]
    # The pair with the same answer is reported in any order.
    twice, alps = [Question("e", "Where is it?", ("y",)), *train], [Question("6", "Where is it", ("alps",))]
    assert [leak.train.id for leak in shared_questions(twice, alps)] == ["d"]
    assert [leak.train.id for leak in shared_questions(twice[::-1], alps)] == ["d"]
    assert shared_questions([], held_out) == shared_questions(train, []) == []


def test_two_releases_of_real_questions_overlap_and_two_datasets_do_not() -> None:
    official = load_questions(shared("nq/NQ-open.dev.jsonl.gz"))
    sample = load_questions(shared("nq/sample_1000.jsonl"))
    leaks = shared_questions(official, sample)
    assert len(leaks) == len(sample) and all(leak.same_answer for leak in leaks)
    assert shared_questions(load_questions(shared("hotpotqa/train_100.json.gz")), sample) == []


def test_real_train_and_dev_questions_of_2wiki_do_not_overlap() -> None:
    train, dev = shared("2wiki/train_500_with_context.json.gz"), shared("2wiki/dev_1000.json.gz")
    assert shared_questions(load_questions(train), load_questions(dev)) == []


def test_real_questions_without_answers_are_compared_too() -> None:
    file, truth = shared("multihop_rag/queries_500.json"), shared("multihop_rag/ground_truth_500.json.gz")
    alone, answered = load_questions(file, answers_optional=True), load_questions(file, truth=truth)
    leaks = shared_questions(alone, answered)
    assert len(leaks) == 500 and not any(leak.train.answers or leak.same_answer for leak in leaks)


@pytest.mark.parametrize(
    "lines",
    [
        [
            {"id": "1", "question": "Who?", "answer": "A", "answerable": True},
            {"id": "1", "question": "Who?", "answer": "A", "answerable": False},
        ],
        [{"question": "Is it?", "answer": True}, {"question": "When?", "answer": 1913}],
        [{"question": "Who?", "answers": {"text": ["A"], "answer_start": [0]}}],
        [{"question": "?!", "answer": "The"}, {"question": "...", "answer": "!"}],
        [{"question": "Who?"}],
    ],
)
def test_a_file_shares_all_questions_and_answers_with_itself(tmp_path: Path, lines: list[dict]) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    questions = load_questions(file, answers_optional=True)
    leaks = shared_questions(questions, questions)
    assert len(leaks) == len(lines) and all(leak.same_answer for leak in leaks)
