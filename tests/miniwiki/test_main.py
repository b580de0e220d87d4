"""Tests of the command line: it writes files that the loaders read, with the same bytes each time."""

import json
from pathlib import Path

import pytest

from rrl.data.passages import load_passages
from rrl.data.questions import load_questions
from rrl.miniwiki.__main__ import main
from rrl.miniwiki.vocabulary import build_tokenizer

WORLD = ["--split=dev", "--passages=200", "--worlds=2", "--questions=20"]
SHIPPED = Path(__file__).parents[2] / "assets" / "miniwiki-tokenizer"


def test_written_files_are_read_by_the_loaders(tmp_path: Path) -> None:
    assert main([f"--out={tmp_path}", *WORLD]) == 0
    passages = load_passages(tmp_path / "passages.jsonl")
    questions = load_questions(tmp_path / "questions.jsonl")
    assert len(passages) == 200
    assert len(questions) == 100
    assert {title for question in questions for title in question.gold} <= {p.title for p in passages}
    first = json.loads((tmp_path / "questions.jsonl").read_text().splitlines()[0])
    assert set(first) == {"id", "question", "golden_answers", "kind", "gold"}


def test_the_same_command_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        main([f"--out={tmp_path / name}", *WORLD])
    for file in ("passages.jsonl", "questions.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_wrong_input_exits_with_2_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "new"
    assert main([f"--out={folder}", "--passages=60", "--worlds=1", "--questions=100000"]) == 2
    assert "questions of kind" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.slow
def test_the_command_reproduces_the_shipped_tokenizer(tmp_path: Path) -> None:
    assert main([f"--tokenizer={tmp_path}"]) == 0
    assert (tmp_path / "tokenizer.json").read_bytes() == (SHIPPED / "tokenizer.json").read_bytes()


def test_the_tokenizer_is_reproducible() -> None:
    a, b = (build_tokenizer(seed=1, vocab_size=400, passages=400, worlds=2) for _ in range(2))
    assert a.backend_tokenizer.to_str() == b.backend_tokenizer.to_str()
