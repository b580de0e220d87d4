"""Answers outlive a kill at any byte, and what else is wrong with their file is named."""

import dataclasses
import json
from pathlib import Path

import pytest

from rrl.errors import UserError
from rrl.eval.judging import verdict_file, verdicts
from rrl.eval.results import Lines, read_lines
from tests.recipes.prompted.scripted import QUESTION


def test_what_a_kill_cut_is_dropped_and_asked_again(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    with Lines(file, "abc") as lines:
        lines.append({"id": "a", "said": "\u2028\ud800 é"})
        lines.append({"id": "b"})
    whole = file.read_bytes()
    for cut in range(len(whole) + 1):
        file.write_bytes(whole[:cut])
        with Lines(file, "abc") as lines:
            assert lines.done == set("ab"[: whole[:cut].count(b"\n")])
            lines.append({"id": "c"})
        assert [line["id"] for line in read_lines(file)] == [*sorted(lines.done - {"c"}), "c"]
    assert read_lines(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"id": "a"}\n{"id": "a"}\n', "line 2: the id 'a' is there twice, first on line 1"),
        ('{"id": "a"}\n{"id": "z"}\n', "line 2: the id 'z' is none of the questions asked"),
        ('{"id": "a"}\nnonsense\n', "line 2: no record with an id"),
        ("[]\n", "line 1: no record with an id"),
    ],
)
def test_a_file_of_another_run_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=words):
        Lines(file, "abc")
    assert file.read_text() == text


class Grader:
    """Says 1 of an answer that holds "Oslo", nothing of "?", 0 of any other."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def grade(self, cases):
        self.asked += [case.predicted for case in cases]
        return [None if case.predicted == "?" else float("Oslo" in case.predicted) for case in cases]


def test_a_judge_is_asked_once_for_each_answer_and_not_for_none(tmp_path: Path) -> None:
    questions = [dataclasses.replace(QUESTION, id=name) for name in "abcd"]
    answers = {"a": "Oslo, Norway", "b": "?", "c": "", "d": "Rome"}
    judge = Grader()
    file = verdict_file(tmp_path, {"kind": "x"})
    found = verdicts(file, judge, "r2ag", questions, answers)
    assert found == {"a": True, "b": None, "c": False, "d": False}
    assert judge.asked == ["Oslo, Norway", "?", "Rome"]
    file.write_text("".join(json.dumps(line) + "\n" for line in read_lines(file)[:3]) + '{"id": "d", ')
    assert verdicts(file, judge, "r2ag", questions, answers) == found
    assert judge.asked[3:] == ["Rome"]
    assert verdict_file(tmp_path, {"kind": "y"}) != file
