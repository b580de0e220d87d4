"""Answers outlive a kill at any byte, and what else is wrong with their file is named."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from rrl.errors import UserError
from rrl.eval.evaluate import with_short_forms
from rrl.eval.judging import judgement_file, short_scores, verdicts
from rrl.eval.predictions import Prediction
from rrl.eval.results import ResultLines, read_lines
from rrl.eval.scoring import score
from rrl.files import SaveError
from rrl.rewards.judge import ModelJudge
from rrl.text.metrics import AnswerScores
from rrl.text.normalize import RULES
from tests.recipes.prompted.scripted import QUESTION


def test_what_a_kill_cut_is_dropped_and_asked_again(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    lines = ResultLines(file, "abc")
    lines.append({"id": "a", "said": "\u2028\ud800 é"})
    lines.append({"id": "b"})
    whole = file.read_bytes()
    for cut in range(len(whole) + 1):
        file.write_bytes(whole[:cut])
        lines = ResultLines(file, "abc")
        assert lines.done == set("ab"[: whole[:cut].count(b"\n")])
        lines.append({"id": "c"})
        assert [line["id"] for line in read_lines(file)] == [*sorted(lines.done - {"c"}), "c"]
    assert read_lines(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"id": "a"}\n{"id": "a"}\n', "line 2: the id 'a' is there twice, first on line 1"),
        ('{"id": "a"}\n{"id": "z"}\n', "line 2: the id 'z' is none of the questions asked"),
        ('{"id": "a"}\n{"id": [1]}\n', r"line 2: the id \[1\] is none of the questions asked"),
        ('{"id": "a"}\nnonsense\n', "line 2: Expecting value.*; remove that line, and its question"),
        ("[]\n", r"line 1: \[\] is not a JSON object"),
        ("{}\n", "line 1: no record with an id"),
    ],
)
def test_a_file_of_another_run_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=words):
        ResultLines(file, "abc")
    assert file.read_text() == text


def test_an_answer_that_cannot_be_written_is_a_failed_save(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lines = ResultLines(tmp_path / "run" / "results.jsonl", "abc")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(SaveError, match=r"results\.jsonl could not be saved: the folder .*run is gone"):
        lines.append({"id": "a"})
    (tmp_path / "results.jsonl").mkdir()
    with pytest.raises(SaveError, match=r"results\.jsonl could not be saved: a folder is in its place"):
        ResultLines(tmp_path / "results.jsonl", "abc")


@pytest.mark.parametrize(
    ("line", "words"),
    [("5", "5 is not a JSON object"), ("{", "Expecting"), ('{"id": "b"}', "there is no 'said'")],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(f'{{"id": "a", "said": 1}}\n{line}\n')
    with pytest.raises(UserError, match=rf"results\.jsonl, line 2: {words}.*; remove that line"):
        read_lines(file, "id", "said")


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
    file = judgement_file(tmp_path, {"kind": "x"}, answers)
    found = verdicts(file, judge, "r2ag", questions, answers)
    assert found == {"a": True, "b": None, "c": False, "d": False}
    assert judge.asked == ["Oslo, Norway", "?", "Rome"]
    file.write_text("".join(json.dumps(line) + "\n" for line in read_lines(file)[:3]) + '{"id": "d", ')
    assert verdicts(file, judge, "r2ag", questions, answers) == found
    assert judge.asked[3:] == ["Rome"]
    assert judgement_file(tmp_path, {"kind": "y"}, answers) != file
    assert judgement_file(tmp_path, {"kind": "x"}, answers | {"d": "Oslo"}) != file  # edited since


def test_em_and_f1_of_long_answers_are_of_the_short_forms_that_the_judge_extracts(tmp_path: Path) -> None:
    # R3-RAG, 4.1 (SPEC.md 6)
    questions = [dataclasses.replace(QUESTION, id=name, answers=("Oslo",)) for name in "abcd"]
    answers = {"a": "It lies in Oslo, I read.", "b": "It is hard to say: Oslo?", "c": "", "d": "Oslo"}
    asked: list[str] = []

    def says(prompts):
        asked.extend(prompt.user_message for prompt in prompts)
        return ['["Oslo", "the city"]' if "I read" in prompt.user_message else "Hm." for prompt in prompts]

    file, rule = tmp_path / "short.jsonl", RULES["squad"]
    found = short_scores(file, ModelJudge(says), rule, questions, answers)
    whole = AnswerScores(1.0, 1.0, 1.0)
    assert found == {"a": whole, "b": None, "c": AnswerScores(0.0, 0.0, 0.0), "d": whole}
    assert len(asked) == 6 and all(answers["a"] in said or answers["b"] in said for said in asked)
    assert short_scores(file, ModelJudge(lambda prompts: 1 / 0), rule, questions, answers) == found

    plain = score([Prediction("line", q.id, "", (answers[q.id],)) for q in questions], questions, rule)
    assert plain.metrics["em"].tolist() == [0, 0, 0, 1]
    shortened = with_short_forms(plain, found)
    assert shortened.metrics["em"].tolist() == [1, 0, 0, 1]
    assert shortened.metrics["f1"][1] == plain.metrics["f1"][1] > 0  # not understood: as it stands
