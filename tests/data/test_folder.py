"""Tests of data folders: which file is which split, and which are read."""

import json
from pathlib import Path

import pytest

from rrl.data.folder import load_folder
from rrl.data.questions import Question
from rrl.errors import UserError
from tests.shared_data import shared


@pytest.mark.parametrize("name", ["2wiki", "hotpotqa", "musique"])
def test_gold_titles_of_real_folders_are_in_their_corpus(name: str) -> None:
    folder = load_folder(shared(name))
    titles = {passage.title for passage in folder.passages}
    questions = folder.questions("dev" if "dev" in folder.files else "train")
    found = [title in titles for question in questions for title in question.gold]
    assert sum(found) / len(found) > 0.98


def test_the_error_of_an_incomplete_folder_lists_its_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"0 corpus files.*no question file.*Found: no files"):
        load_folder(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "train_a.json").write_text("[]")
    (tmp_path / "train_b.json").write_text("[]")
    with pytest.raises(UserError, match=r"0 corpus files.*Found: notes.txt, train_a.json"):
        load_folder(tmp_path)
    with pytest.raises(UserError, match=r"2 files for the split 'train' \(train_a.json, train_b.json\)"):
        load_folder(tmp_path, corpus=False).first_split_with_answers(["train"])
    with pytest.raises(UserError, match="not a folder"):
        load_folder(tmp_path / "none")


def test_files_of_a_folder_are_assigned_by_name(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"title": "T", "text": "x"}\n')
    (tmp_path / "questions_small.jsonl").write_text('{"question": "Who?", "answer": "A"}\n')
    (tmp_path / "dev.json").write_text('[{"question": "Who?", "answer": "B"}]')
    folder = load_folder(tmp_path)
    assert [passage.title for passage in folder.passages] == ["T"]
    assert {split: folder.questions(split)[0].answers for split in folder.files} == {
        "questions": ("A",),
        "dev": ("B",),
    }


def test_a_folder_may_hold_tables_and_unused_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "corpus.csv").write_text('id,title,text\n1,T,"x\ny"\n')
    (tmp_path / "dev.tsv").write_text("question\tanswer\nWho?\tB\n")
    (tmp_path / "train.json").write_text("broken")
    folder = load_folder(tmp_path)
    assert folder.passages[0].text == "x\ny"
    assert folder.questions("dev") == [Question("0", "Who?", ("B",))]
    with pytest.raises(UserError, match=r"train\.json: not JSON"):
        folder.questions("train")


def test_a_split_without_gold_answers_is_skipped_and_a_broken_split_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unanswered = {"question": "Who?", "answer": ""}
    test, dev = tmp_path / "test.json", tmp_path / "dev.json"
    test.write_text(json.dumps([unanswered, {"question": "Why?"}]))
    dev.write_text(json.dumps([unanswered | {"answer": "A"}]))
    folder = load_folder(tmp_path, corpus=False)
    assert folder.first_split_with_answers(("test", "dev")) == ("dev", [Question("0", "Who?", ("A",))])
    assert "test.json has no gold answers and is not used" in caplog.text
    assert folder.first_split_with_answers(("test", "dev"), exclude="dev") is None
    for faulty in ([unanswered, unanswered | {"answer": "A"}], [{"title": "T", "text": "x"}], []):
        test.write_text(json.dumps(faulty))
        with pytest.raises(UserError, match=r"test\.json"):
            folder.first_split_with_answers(("test", "dev"))
