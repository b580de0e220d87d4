"""Files of answers survive a kill at any byte, and errors name other faults."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from rrl.errors import UserError
from rrl.eval.evaluation_report import with_short_forms
from rrl.eval.judging import judge_correctness, score_short_answers, verdicts_file
from rrl.eval.predictions import Prediction
from rrl.eval.results import ResultLines, read_lines
from rrl.eval.scoring import score
from rrl.files import SaveError
from rrl.rewards.judge import ModelJudge
from rrl.text.metrics import AnswerScores
from rrl.text.normalize import RULES
from tests.recipes.prompted.scripted import QUESTION


def test_an_incomplete_last_line_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    lines = ResultLines(file, "abc")
    lines.append({"id": "a", "text": "\u2028\ud800 é"})
    lines.append({"id": "b"})
    whole = file.read_bytes()
    for cut in range(len(whole) + 1):
        file.write_bytes(whole[:cut])
        lines = ResultLines(file, "abc")
        assert lines.ids == set("ab"[: whole[:cut].count(b"\n")])
        lines.append({"id": "c"})
        assert [line["id"] for line in read_lines(file)] == [*sorted(lines.ids - {"c"}), "c"]
    assert read_lines(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"id": "a"}\n{"id": "a"}\n', "line 2: the id 'a' occurs twice, first on line 1"),
        ('{"id": "a"}\n{"id": "z"}\n', "line 2: the id 'z' belongs to no question of this evaluation"),
        ('{"id": "a"}\n{"id": [1]}\n', r"line 2: the id \[1\] belongs to no question of this evaluation"),
        ('{"id": "a"}\nnonsense\n', "line 2: Expecting value.*; remove that line, and its question"),
        ("[]\n", r"line 1: \[\] is not a JSON object"),
        ("{}\n", "line 1: the record has no id"),
    ],
)
def test_errors_name_the_line_of_a_file_of_another_run(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=words):
        ResultLines(file, "abc")
    assert file.read_text() == text


def test_an_answer_that_cannot_be_written_raises_save_error(tmp_path: Path) -> None:
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
    [("5", "5 is not a JSON object"), ("{", "Expecting"), ('{"id": "b"}', "there is no 'text'")],
)
def test_errors_name_an_unreadable_line(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(f'{{"id": "a", "text": 1}}\n{line}\n')
    with pytest.raises(UserError, match=rf"results\.jsonl, line 2: {words}.*; remove that line"):
        read_lines(file, "id", "text")


class Grader:
    """Grades an answer with "Oslo" as 1, "?" as None (not parsed), and any other as 0."""

    def __init__(self) -> None:
        self.judged: list[str] = []

    def grade(self, cases):
        self.judged += [case.predicted for case in cases]
        return [None if case.predicted == "?" else float("Oslo" in case.predicted) for case in cases]


def test_each_answer_is_judged_once_and_empty_answers_never(tmp_path: Path) -> None:
    questions = [dataclasses.replace(QUESTION, id=name) for name in "abcd"]
    answers = {"a": "Oslo, Norway", "b": "?", "c": "", "d": "Rome"}
    judge = Grader()
    file = verdicts_file(tmp_path, {"kind": "x"}, answers)
    found = judge_correctness(file, judge, "r2ag", questions, answers)
    assert found == {"a": True, "b": None, "c": False, "d": False}
    assert judge.judged == ["Oslo, Norway", "?", "Rome"]
    file.write_text("".join(json.dumps(line) + "\n" for line in read_lines(file)[:3]) + '{"id": "d", ')
    assert judge_correctness(file, judge, "r2ag", questions, answers) == found
    assert judge.judged[3:] == ["Rome"]
    assert verdicts_file(tmp_path, {"kind": "y"}, answers) != file
    assert verdicts_file(tmp_path, {"kind": "x"}, answers | {"d": "Oslo"}) != file  # an answer was edited


def test_em_and_f1_of_long_answers_use_the_short_forms_of_the_judge(tmp_path: Path) -> None:
    # R3-RAG, 4.1
    questions = [dataclasses.replace(QUESTION, id=name, answers=("Oslo",)) for name in "abcd"]
    answers = {"a": "It lies in Oslo, I read.", "b": "It is hard to say: Oslo?", "c": "", "d": "Oslo"}
    prompts_sent: list[str] = []

    def says(prompts):
        prompts_sent.extend(prompt.user_message for prompt in prompts)
        return ['["Oslo", "the city"]' if "I read" in prompt.user_message else "Hm." for prompt in prompts]

    file, rule = tmp_path / "short.jsonl", RULES["squad"]
    found = score_short_answers(file, ModelJudge(says), rule, questions, answers)
    whole = AnswerScores(1.0, 1.0, 1.0)
    assert found == {"a": whole, "b": None, "c": AnswerScores(0.0, 0.0, 0.0), "d": whole}
    assert len(prompts_sent) == 6 and all(
        answers["a"] in prompt or answers["b"] in prompt for prompt in prompts_sent
    )
    assert score_short_answers(file, ModelJudge(lambda prompts: 1 / 0), rule, questions, answers) == found

    plain = score([Prediction("line", q.id, "", (answers[q.id],)) for q in questions], questions, rule)
    assert plain.metrics["em"].tolist() == [0, 0, 0, 1]
    shortened = with_short_forms(plain, found)
    assert shortened.metrics["em"].tolist() == [1, 0, 0, 1]
    assert shortened.metrics["f1"][1] == plain.metrics["f1"][1] > 0  # not parsed: the full answer is scored
