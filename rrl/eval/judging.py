"""Judge answers: whether each is correct, and scores of the short forms that the judge extracts from long answers.

Verdicts are saved as they arrive. Read `judge_correctness` first.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.eval.results import ResultLines, read_lines
from rrl.rewards.judge import Judge
from rrl.rewards.judge_prompts import Correctness, JudgePrompt, ShortAnswer, Validation
from rrl.runs.progress import Progress
from rrl.text.metrics import AnswerScores, score_answer
from rrl.text.normalize import AnswerRule

PROMPTS: Mapping[str, Callable[[Question, str], JudgePrompt]] = {"tiresrag": Correctness, "r2ag": Validation}
"""Judge prompts by name: tiresrag (TIRESRAG-R1, Figure 13) and r2ag (R2AG, Figure A.4)."""
JUDGE_BATCH = 256
"""Answers that are judged in one batch. A kill loses at most one batch."""


@dataclasses.dataclass(frozen=True)
class Judgements:
    """What a judge found about the answers of an evaluation; empty without a judge."""

    verdicts: Mapping[str, bool | None] = dataclasses.field(default_factory=dict)
    """Whether the answer to each question, by id, is correct; None if the judge's reply could not be parsed."""
    short_scores: Mapping[str, AnswerScores | None] = dataclasses.field(default_factory=dict)
    """Scores of the short form of each answer, by id (`score_short_answers`); empty unless the method has long answers."""
    file_name: str = ""
    """Name of the file of the verdicts. In timing.jsonl it marks the lines with this judge's seconds."""


def verdicts_file(folder: Path, identity: Mapping[str, Any], answers: Mapping[str, str]) -> Path:
    """Return the file for the verdicts of one judge on these answers.

    Its name has a hash of judge and answers, so verdicts of another judge, or on edited answers, are never reused.
    """
    digest = hashlib.sha256(json.dumps([identity, answers], sort_keys=True).encode()).hexdigest()
    return folder / f"verdicts-{digest[:12]}.jsonl"


def judge_correctness(
    file: Path, judge: Judge, prompt: str, questions: Sequence[Question], answers: Mapping[str, str]
) -> dict[str, bool | None]:
    """Return by question id whether the judge finds the answer correct; None if its reply could not be parsed.

    An empty answer is wrong and is not sent to the judge. Verdicts that `file` already has are reused.

    Args:
      file: see `verdicts_file`; new verdicts are appended.
      judge: the judge.
      prompt: one of `PROMPTS`.
      questions: the questions.
      answers: the answer to each question, by id.

    Raises UserError for an unknown prompt.
    """
    if prompt not in PROMPTS:
        raise UserError(f"judge_prompt={prompt!r} is unknown; choose one of {', '.join(PROMPTS)}")
    make_prompt = PROMPTS[prompt]

    def grade(batch: Sequence[Question]) -> list[dict[str, Any]]:
        answered = [question for question in batch if answers[question.id]]
        scores = judge.grade([make_prompt(question, answers[question.id]) for question in answered])
        by_id = dict(zip((question.id for question in answered), scores, strict=True))
        pairs = [(question.id, by_id.get(question.id, 0.0)) for question in batch]
        return [
            {"id": question_id, "verdict": None if score is None else score >= 0.5}
            for question_id, score in pairs
        ]

    lines = _grade_missing(file, questions, grade, "judge", ("verdict",))
    return {question_id: line["verdict"] for question_id, line in lines.items()}


def score_short_answers(
    file: Path, judge: Judge, rule: AnswerRule, questions: Sequence[Question], answers: Mapping[str, str]
) -> dict[str, AnswerScores | None]:
    """Return EM, F1 and cover-EM of the short form that the judge extracts from each long answer (R3-RAG, 4.1), by id.

    The value is None if the judge's reply could not be parsed. An answer that is empty, or already an exact match, is not sent
    to the judge. Scores that `file` already has are reused.
    """

    def grade(batch: Sequence[Question]) -> list[dict[str, Any]]:
        full = {q.id: score_answer(answers[q.id], q.answers, rule) for q in batch}
        to_judge = [q for q in batch if answers[q.id] and not full[q.id].em]
        names = AnswerScores._fields
        # The prompts of one answer are equal, and only the metric computed from the reply differs. An endpoint receives equal
        # prompts once.
        scores = judge.grade([ShortAnswer(q, answers[q.id], name, rule) for q in to_judge for name in names])
        judged = {q.id: scores[at * len(names) : (at + 1) * len(names)] for at, q in enumerate(to_judge)}
        return [{"id": q.id, **dict(zip(names, judged.get(q.id, full[q.id]), strict=True))} for q in batch]

    lines = _grade_missing(file, questions, grade, "short answers", AnswerScores._fields)
    values = {
        question_id: [line[metric] for metric in AnswerScores._fields] for question_id, line in lines.items()
    }
    return {
        question_id: None if None in scores else AnswerScores(*scores)
        for question_id, scores in values.items()
    }


def _grade_missing(
    file: Path,
    questions: Sequence[Question],
    grade: Callable[[Sequence[Question]], list[dict[str, Any]]],
    label: str,
    fields: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Return a record with `fields` for each question, by id; grade those that `file` lacks and append their records to it."""
    lines = ResultLines(file, [question.id for question in questions])
    with Progress(len(questions), start=len(lines.ids), label=label) as progress:
        todo = [question for question in questions if question.id not in lines.ids]
        for at in range(0, len(todo), JUDGE_BATCH):
            for record in grade(todo[at : at + JUDGE_BATCH]):
                lines.append(record)
            progress.update(len(lines.ids), {})
    return {line["id"]: line for line in read_lines(file, *fields)}
