"""Seconds per question, from the batches that an evaluation timed."""

import json
import time
from pathlib import Path

import pytest

from rrl.errors import UserError
from rrl.eval.methods import TimedReader
from rrl.eval.timing import append_timing, read_timing, seconds_per_question
from rrl.rewards.reader import ReaderReply


def test_seconds_are_averaged_over_complete_batches(tmp_path: Path) -> None:
    lines = [{"questions": 10, "answer": 5.0, "search": 1.0}, {"questions": 30, "answer": 5.0, "search": 1.0}]
    lines += [{"questions": 0, "judged": "a", "judge": 3.0}, {"questions": 10, "judged": "b", "judge": 20.0}]
    (tmp_path / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for judged, more in (("", {}), ("a", {}), ("b", {"judge": 2.0})):  # each judge separately
        assert seconds_per_question(tmp_path, judged) == {"answer": 0.25, "search": 0.05} | more


def test_the_readers_seconds_are_measured_separately(tmp_path: Path) -> None:
    generator = TimedReader(
        lambda prompts: time.sleep(0.02) or [ReaderReply(str(p).upper(), 1, 1) for p in prompts]
    )
    assert generator(["a"]) == ["A"] and generator(["b", "c"]) == ["B", "C"]
    assert 0.04 <= generator.seconds < 5 and [reply.text for reply in generator.last_replies] == ["B", "C"]
    (tmp_path / "timing.jsonl").write_text('{"questions": 10, "answer": 5.0, "search": 1.0, "read": 2.0}\n')
    assert seconds_per_question(tmp_path) == {"answer": 0.5, "search": 0.1, "read": 0.2}


def test_an_incomplete_line_of_timing_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "timing.jsonl").write_text('{"questions": 10, "answer": 5.0}\n{"questions": 1')
    assert seconds_per_question(tmp_path) == {"answer": 0.5}
    append_timing(tmp_path, 10, answer=1.0)
    assert seconds_per_question(tmp_path) == {"answer": 0.3}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"questions": "x", "answer": 1}', "questions='x' must be a number"),
        ('{"questions": 1, "answer": null}', "answer=None must be a number"),
        ('{"questions": 1, "commit": 7}', "commit=7 must be a text"),
        ('{"questions": 1, "policy_format": 8}', "policy_format=8 must be a text"),
    ],
)
def test_errors_name_a_line_with_a_wrong_type(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "timing.jsonl").write_text(f'{{"questions": 10, "answer": 5.0}}\n{line}\n')
    for read in (read_timing, seconds_per_question):
        with pytest.raises(UserError, match=rf"timing\.jsonl, line 2: {words}; remove that line"):
            read(tmp_path)


def test_the_line_before_a_batch_counts_no_questions_and_no_seconds(tmp_path):
    append_timing(tmp_path, 0, commit="abc", policy_format="bfloat16")
    append_timing(tmp_path, 4, commit="abc", policy_format="bfloat16", answer=8.0)
    assert seconds_per_question(tmp_path) == {"answer": 2.0}
