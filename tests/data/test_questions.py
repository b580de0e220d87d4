"""Question files in their publishers' forms, data folders, and what happens to broken ones."""

import json
from pathlib import Path

import pytest

from rrl.data.folder import load_folder
from rrl.data.questions import Question, load_questions, save_questions
from rrl.errors import UserError
from tests.shared_data import shared


def written(folder: Path, *records: dict) -> Path:
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"id": "q1", "question": "Who?", "golden_answers": ["A", "B"]}, Question("q1", "Who?", ("A", "B"))),
        ({"question": "Who?", "answer": ["A", " A ", "B"]}, Question("0", "Who?", ("A", "B"))),
        (
            {
                "_id": "q2",
                "type": "bridge",
                "question": "Who?",
                "answer": "A",
                "supporting_facts": [["T", 0], ["T", 1], ["U", 0]],
            },
            Question("q2", "Who?", ("A",), "bridge", ("T", "U")),
        ),
        (
            {
                "id": "q3",
                "question": "Who?",
                "answer": "A",
                "answer_aliases": ["a", "A"],
                "supporting_facts": ["T"],
            },
            Question("q3", "Who?", ("A", "a"), "", ("T",)),
        ),
        (
            {
                "id": "2hop__1_2",
                "question": "Who?",
                "answer": "A",
                "answer_aliases": [],
                "paragraphs": [{"title": "T", "is_supporting": True}, {"title": "U", "is_supporting": False}],
            },
            Question("2hop__1_2", "Who?", ("A",), "", ("T",)),
        ),
    ],
)
def test_every_form_is_understood(tmp_path: Path, record: dict, expected: Question) -> None:
    assert load_questions(written(tmp_path, record)) == [expected]


def test_our_own_form_comes_back_unchanged(tmp_path: Path) -> None:
    questions = [Question("a", "Ærø?", ("x", "y"), "two_hop", ("T",)), Question("b", "Is it?", ("yes",))]
    save_questions(tmp_path / "questions.jsonl", questions)
    assert load_questions(tmp_path / "questions.jsonl") == questions


def test_broken_lines_are_skipped_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = {"question": "Who?", "answer": "A"}
    file = written(tmp_path, good, {"question": "No answer?"}, {"answer": "A"}, {**good, "answer": [3]}, good)
    skipped: list[str] = []
    assert [question.id for question in load_questions(file, "skip", skipped)] == ["0", "4"]
    assert [place.split(":")[0] for place in skipped] == ["line 2", "line 3", "line 4"]
    assert "skipped 3 broken records of 5 (line 2: " in caplog.text
    with pytest.raises(
        UserError,
        match=r"questions.jsonl, line 2: no gold answer.*Allowed: .*golden_answers.*--config\.data\.on_error=skip",
    ):
        load_questions(file)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", [1]),
        ("question", 3),
        ("answer", 7),
        ("supporting_facts", [3]),
        ("supporting_facts", [[]]),
        ("paragraphs", ["x"]),
        ("supporting_facts", 5),
    ],
)
def test_fields_of_the_wrong_type_are_named(tmp_path: Path, field: str, value: object) -> None:
    record = {"question": "Who?", "answer": "A", field: value}
    with pytest.raises(UserError, match=f"line 1: .*{field}"):
        load_questions(written(tmp_path, record))


@pytest.mark.parametrize(
    ("name", "count", "with_gold"),
    [
        ("2wiki/dev_1000.json.gz", 1000, True),
        ("2wiki/train_500_with_context.json.gz", 500, True),
        ("hotpotqa/train_100.json.gz", 100, True),
        ("musique/train_100.json.gz", 100, True),
        ("bamboogle/test_125.jsonl", 125, False),
        ("nq/NQ-open.dev.jsonl.gz", 3610, False),
        ("nq/sample_1000.jsonl", 1000, False),
        ("popqa/sample_1000.jsonl.gz", 1000, False),
        ("triviaqa/sample_1000.jsonl.gz", 1000, False),
    ],
)
def test_real_questions_are_read_whole(name: str, count: int, with_gold: bool) -> None:
    questions = load_questions(shared(name))
    assert len(questions) == count
    assert all(question.text and question.answers for question in questions)
    assert all(bool(question.gold) == with_gold for question in questions)
    assert len({question.id for question in questions}) == count


@pytest.mark.parametrize("name", ["2wiki", "hotpotqa", "musique"])
def test_gold_titles_of_real_folders_are_in_their_corpus(name: str) -> None:
    folder = load_folder(shared(name))
    titles = {passage.title for passage in folder.passages}
    questions = folder.splits["dev" if "dev" in folder.splits else "train"]
    found = [title in titles for question in questions for title in question.gold]
    assert sum(found) / len(found) > 0.98


def test_a_folder_without_what_is_needed_says_what_it_found(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"0 corpus files.*no question file.*Found: nothing"):
        load_folder(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "train_a.json").write_text("[]")
    (tmp_path / "train_b.json").write_text("[]")
    with pytest.raises(UserError, match=r"2 files for the split 'train'.*Found: notes.txt, train_a.json"):
        load_folder(tmp_path)
    with pytest.raises(UserError, match="not a folder"):
        load_folder(tmp_path / "none")


def test_a_folder_is_read_by_file_names(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"title": "T", "text": "x"}\n')
    (tmp_path / "questions_small.jsonl").write_text('{"question": "Who?", "answer": "A"}\n')
    (tmp_path / "dev.json").write_text('[{"question": "Who?", "answer": "B"}]')
    folder = load_folder(tmp_path)
    assert [passage.title for passage in folder.passages] == ["T"]
    assert {split: questions[0].answers for split, questions in folder.splits.items()} == {
        "questions": ("A",),
        "dev": ("B",),
    }
