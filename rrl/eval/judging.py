"""What a judge says of answers: whether each is right, and the short forms of long ones; kept as it comes."""

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
from rrl.text.normalize import Rule

PROMPTS: Mapping[str, Callable[[Question, str], JudgePrompt]] = {"tiresrag": Correctness, "r2ag": Validation}
"""TIRESRAG-R1, Figure 13, and R2AG, Figure A.4."""
JUDGE_BATCH = 256
"""Answers that are judged at once: a kill loses no more."""


def judgement_file(folder: Path, identity: Mapping[str, Any], answers: Mapping[str, str]) -> Path:
    """Where the verdicts of one judge on these answers stand, so that another's, or those on answers that were edited since, are
    never taken for them."""
    digest = hashlib.sha256(json.dumps([identity, answers], sort_keys=True).encode()).hexdigest()
    return folder / f"verdicts-{digest[:12]}.jsonl"


def verdicts(
    file: Path, judge: Judge, prompt: str, questions: Sequence[Question], answers: Mapping[str, str]
) -> dict[str, bool | None]:
    """What the judge says of the answer to each question, by id; None where that could not be understood.

    No answer is wrong, and costs the judge nothing. `prompt` is one of `PROMPTS`; those that `file` holds already are not asked
    again.
    """
    if prompt not in PROMPTS:
        raise UserError(f"judge_prompt={prompt!r} is unknown; there are {', '.join(PROMPTS)}")
    case = PROMPTS[prompt]

    def graded(some: Sequence[Question]) -> list[dict[str, Any]]:
        told = [question for question in some if answers[question.id]]
        scores = judge.grade([case(question, answers[question.id]) for question in told])
        said = dict(zip((question.id for question in told), scores, strict=True))
        found = [(question.id, said.get(question.id, 0.0)) for question in some]
        return [{"id": name, "verdict": None if score is None else score >= 0.5} for name, score in found]

    found = _kept(file, questions, graded, "judge", ("verdict",))
    return {name: line["verdict"] for name, line in found.items()}


def short_scores(
    file: Path, judge: Judge, rule: Rule, questions: Sequence[Question], answers: Mapping[str, str]
) -> dict[str, AnswerScores | None]:
    """EM, F1 and cover-EM of the short forms that the judge extracts from each long answer (R3-RAG, 4.1), by id; None where they
    could not be understood.

    No answer, and one that is exact as it stands, costs the judge nothing; those that `file` holds already are not asked again.
    """

    def graded(some: Sequence[Question]) -> list[dict[str, Any]]:
        plain = {q.id: score_answer(answers[q.id], q.answers, rule) for q in some}
        told = [q for q in some if answers[q.id] and not plain[q.id].em]
        names = AnswerScores._fields
        scores = judge.grade([ShortAnswer(q, answers[q.id], name, rule) for q in told for name in names])
        said = {q.id: scores[at * len(names) : (at + 1) * len(names)] for at, q in enumerate(told)}
        return [{"id": q.id, **dict(zip(names, said.get(q.id, plain[q.id]), strict=True))} for q in some]

    found = _kept(file, questions, graded, "short answers", AnswerScores._fields)
    values = {name: [line[metric] for metric in AnswerScores._fields] for name, line in found.items()}
    return {name: None if None in some else AnswerScores(*some) for name, some in values.items()}


def _kept(
    file: Path,
    questions: Sequence[Question],
    graded: Callable[[Sequence[Question]], list[dict[str, Any]]],
    label: str,
    fields: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """A record of each question, with `fields`, by id: those that `file` holds, and of the others what `graded` says, written as
    it comes."""
    lines = ResultLines(file, [question.id for question in questions])
    with Progress(len(questions), start=len(lines.done), label=label) as progress:
        todo = [question for question in questions if question.id not in lines.done]
        for at in range(0, len(todo), JUDGE_BATCH):
            for record in graded(todo[at : at + JUDGE_BATCH]):
                lines.append(record)
            progress.update(len(lines.done), {})
    return {line["id"]: line for line in read_lines(file, *fields)}
