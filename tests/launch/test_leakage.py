"""Tests of the leakage command: its exit code states whether questions are shared; wrong input ends with
one line and exit code 2."""

import json
import pathlib
import subprocess

from tests.launching import launch


def leakage(*flags: str) -> subprocess.CompletedProcess:
    return launch("leakage", *flags)


def written(file: pathlib.Path, *texts: str) -> str:
    file.write_text("".join(json.dumps({"question": text, "answer": "x"}) + "\n" for text in texts))
    return str(file)


def test_shared_questions_are_printed_and_written(tmp_path: pathlib.Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text('{"question": "Who is it?", "answer": "x"}\n{"question": "Where?"}\n')  # no answer
    held_out = written(tmp_path / "test.jsonl", "When?", "who is it")
    found = leakage(f"--train={train}", f"--held_out={held_out}", f"--out={tmp_path / 'leaks.jsonl'}")
    assert found.returncode == 1, found.stderr
    assert (
        "1 of 2 held-out questions are among the 2 training questions, 1 of them with the same answer"
        in found.stdout
    )
    assert "  1 = 0: who is it" in found.stdout
    assert json.loads((tmp_path / "leaks.jsonl").read_text())["train"] == "0"
    assert (
        leakage(f"--train={train}", f"--held_out={written(tmp_path / 'dev.jsonl', 'When?')}").returncode == 0
    )


def test_a_broken_line_is_refused_by_number(tmp_path: pathlib.Path) -> None:
    train = written(tmp_path / "train.jsonl", "Who is it?", "")
    found = leakage(f"--train={train}", f"--held_out={train}", f"--out={tmp_path / 'leaks.jsonl'}")
    assert found.returncode == 2
    assert found.stderr.startswith("error: ") and "train.jsonl, line 2: question: got ''" in found.stderr
    assert not (tmp_path / "leaks.jsonl").exists()


def test_an_unwritable_output_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    train = written(tmp_path / "train.jsonl", "Who is it?")
    found = leakage(f"--train={train}", f"--held_out={train}", f"--out={tmp_path / 'none/leaks.jsonl'}")
    assert found.returncode == 2 and found.stderr.count("\n") == 1
    assert "none/leaks.jsonl: cannot be written" in found.stderr
