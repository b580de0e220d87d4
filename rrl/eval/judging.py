"""Whether answers are right in the eyes of a judge: a verdict for each, kept as it comes."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.eval.results import Lines, read_lines
from rrl.rewards.cases import Case, Correctness, Validation
from rrl.rewards.judge import Judge
from rrl.train.progress import Progress

PROMPTS: Mapping[str, Callable[[Question, str], Case]] = {"tiresrag": Correctness, "r2ag": Validation}
"""TIRESRAG-R1, Figure 13, and R2AG, Figure A.4."""
TOGETHER = 256
"""Answers that are judged at once: a kill loses no more."""


def verdict_file(folder: Path, identity: Mapping[str, Any]) -> Path:
    """Where the verdicts of one judge stand, so that another's are never taken for them."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
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
    with (
        Lines(file, answers) as lines,
        Progress(len(questions), start=len(lines.done), label="judge") as progress,
    ):
        todo = [question for question in questions if question.id not in lines.done]
        for at in range(0, len(todo), TOGETHER):
            some = todo[at : at + TOGETHER]
            told = [question for question in some if answers[question.id]]
            scores = judge.grade([case(question, answers[question.id]) for question in told])
            said = dict(zip((question.id for question in told), scores, strict=True))
            for question in some:
                score = said.get(question.id, 0.0)
                lines.append({"id": question.id, "verdict": None if score is None else score >= 0.5})
            progress.update(len(lines.done), {})
    return {line["id"]: line["verdict"] for line in read_lines(file)}
