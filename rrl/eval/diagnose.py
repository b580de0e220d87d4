"""Diagnose where search agents fail: TIRESRAG-R1's preliminary study (section 3, appendix B, Tables 1 and 2).

It applies to any trajectories. Read `diagnose` first.
"""

import dataclasses
from collections.abc import Sequence

from rrl.data.trajectory import Trajectory
from rrl.report.summary import table
from rrl.rewards.judge import Judge
from rrl.rewards.judge_prompts import ErrorAnalysis, Sufficiency
from rrl.rewards.transcript import shown_searches, transcript_of
from rrl.text.metrics import cover_exact_match
from rrl.text.spans import Tag

OVER, GOOD, UNDER = "overthinking", "good thinking", "underthinking"
THINKING = (OVER, GOOD, UNDER)
ERRORS = (
    ("insufficient", "knowledge retrieved incorrect"),
    ("insufficient", "thinking incorrect"),
    ("sufficient", "thinking process mismatch evidence"),
    ("sufficient", "thinking correct but incorrect answer"),
    ("sufficient", "thinking process match evidence but incorrect"),
)
"""Table 2: (context, kind of error)."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of one trajectory."""

    thinking: str
    """One of THINKING."""
    right: bool
    error: int | None = None
    """Index into ERRORS; None if the answer is right."""
    unparsed: int = 0
    """Replies of the judge that could not be parsed; each counts as no."""


def diagnose(trajectories: Sequence[Trajectory], judge: Judge, answer: Tag = "answer") -> list[Diagnosis]:
    """Diagnose each trajectory.

    Appendix B, for a trajectory with n searches: underthinking means that the gold answer cannot be inferred after all n
    searches. Otherwise, overthinking means that it can be inferred after fewer than n searches already, and good thinking that
    it cannot. For wrong answers, three further judge prompts (`rrl.rewards.judge_instructions.ERROR_ASPECTS`) distinguish the
    kinds of error. An answer is right by cover exact match.

    Args:
      trajectories: `answer`, `segments`, `searches` and the question are read.
      judge: called twice, for all trajectories at once: on sufficiency after 0, 1, ..., n searches, and on the kinds of error.
      answer: the tag of answers; their text is left out of the judged transcript.

    Returns the diagnoses, in the order of the trajectories.
    """
    prompts = [
        (index, Sufficiency(t.question, transcript_of(t, answer, max_searches=searches)))
        for index, t in enumerate(trajectories)
        for searches in range(len(t.searches) + 1)
    ]
    # For each trajectory: whether the first 0, 1, ..., n searches suffice for the gold answer.
    sufficiency: list[list[float | None]] = [[] for _ in trajectories]
    for (index, _), score in zip(prompts, judge.grade([prompt for _, prompt in prompts]), strict=True):
        sufficiency[index].append(score)
    right = [cover_exact_match(t.answer, t.question.answers) > 0 for t in trajectories]
    # Which `ERROR_ASPECTS` of a wrong answer are judged depends on whether all its searches together suffice.
    aspects = [("faithful", "reached") if scores[-1] else ("mistaken",) for scores in sufficiency]
    error_prompts = [
        (
            index,
            aspect,
            ErrorAnalysis(t.question, transcript_of(t, answer), t.answer, aspect, _last_titles(t)),
        )
        for index, t in enumerate(trajectories)
        if not right[index]
        for aspect in aspects[index]
    ]
    by_aspect: list[dict[str, float | None]] = [{} for _ in trajectories]
    error_scores = judge.grade([prompt for *_, prompt in error_prompts])
    for (index, aspect, _), score in zip(error_prompts, error_scores, strict=True):
        by_aspect[index][aspect] = score
    return [
        Diagnosis(
            _thinking(scores),
            correct,
            None if correct else _error(bool(scores[-1]), verdicts),
            sum(score is None for score in (*scores, *verdicts.values())),
        )
        for scores, correct, verdicts in zip(sufficiency, right, by_aspect, strict=True)
    ]


def _last_titles(trajectory: Trajectory) -> tuple[str, ...]:
    """Return the titles that the last search found."""
    searches = shown_searches(trajectory)
    return searches[-1].titles if searches else ()


def _thinking(sufficiency: Sequence[float | None]) -> str:
    """Return one of THINKING. `sufficiency` has a score for the first 0, 1, ..., n searches; None and 0 count as no."""
    if not sufficiency[-1]:
        return UNDER
    return OVER if any(sufficiency[:-1]) else GOOD


def _error(sufficient: bool, verdicts: dict[str, float | None]) -> int:
    """Return the row of ERRORS for a wrong answer, from the judge's scores by aspect.

    Not sufficient: row 0 if the policy mistook facts about something else for the answer ("mistaken"), otherwise row 1.
    Sufficient: row 3 if it reached the right answer in its thoughts ("reached"), row 4 if its thoughts agree with the evidence
    ("faithful"), otherwise row 2.
    """
    if not sufficient:
        return 0 if verdicts["mistaken"] else 1
    if verdicts["reached"]:
        return 3
    return 4 if verdicts["faithful"] else 2


def report(diagnoses: Sequence[Diagnosis]) -> str:
    """Return Tables 1 and 2 of the paper: right and wrong answers by kind of thinking, and the shares of the errors."""
    counts = [
        [sum(d.thinking == kind and d.right == right for d in diagnoses) for right in (True, False)]
        for kind in THINKING
    ]
    rows = [("", "right", "wrong"), *((kind, *map(str, row)) for kind, row in zip(THINKING, counts))]
    wrong = [d.error for d in diagnoses if d.error is not None]
    errors = [("context    error", "number", "share")]
    for index, (context, kind) in enumerate(ERRORS):
        number = wrong.count(index)
        share = f"{100 * number / len(wrong):.1f} %" if wrong else "–"
        errors.append((f"{context:<12}  {kind}", str(number), share))
    unparsed = sum(d.unparsed for d in diagnoses)
    closing = [f"{unparsed} replies of the judge could not be parsed"] if unparsed else []
    return "\n".join(
        [
            f"{len(diagnoses)} trajectories",
            *table(rows),
            "",
            f"{len(wrong)} wrong answers",
            *table(errors),
            *closing,
        ]
    )
