"""Where search agents fail: TIRESRAG-R1's preliminary study (section 3, appendix B, Tables 1 and 2) for any trajectories."""

import dataclasses
from collections.abc import Sequence

from rrl.data.trajectory import Trajectory
from rrl.report.summary import table
from rrl.rewards.judge import Judge
from rrl.rewards.judge_prompts import ErrorAnalysis, Sufficiency, shown_searches, transcript_of
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
"""Table 2: context, kind of error."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What is said of one trajectory."""

    thinking: str
    """One of THINKING."""
    right: bool
    error: int | None = None
    """Index into ERRORS; None where the answer is right."""
    unread: int = 0
    """Answers of the judge that could not be read, which count as no."""


def diagnose(trajectories: Sequence[Trajectory], judge: Judge, answer: Tag = "answer") -> list[Diagnosis]:
    """Diagnoses each trajectory, in their order.

    Appendix B: with n searches, overthinking can infer the gold answer after fewer than n of them, good thinking after the
    n-th only, underthinking never. The kinds of error are told apart by three further questions
    (`rrl.rewards.judge_prompts.ERROR_ASPECTS`) about the wrong answers. An answer is right by cover exact match.

    Args:
      trajectories: what was done; `answer`, `segments`, `searches` and the question are read.
      judge: asked for sufficiency after each search, all trajectories in one call.
      answer: the tag of answers, which are no part of what was thought.
    """
    asked = [
        (place, searches, Sufficiency(t.question, transcript_of(t, answer, searches=searches)))
        for place, t in enumerate(trajectories)
        for searches in range(len(t.searches) + 1)
    ]
    enough: list[list[float | None]] = [[] for _ in trajectories]
    for (place, *_), score in zip(asked, judge.grade([case for *_, case in asked]), strict=True):
        enough[place].append(score)
    right = [cover_exact_match(t.answer, t.question.answers) > 0 for t in trajectories]
    names = [("faithful", "reached") if scores[-1] else ("mistaken",) for scores in enough]
    further = [
        (place, name, ErrorAnalysis(t.question, transcript_of(t, answer), t.answer, name, _last(t)))
        for place, t in enumerate(trajectories)
        if not right[place]
        for name in names[place]
    ]
    found: list[dict[str, float | None]] = [{} for _ in trajectories]
    for (place, name, _), score in zip(further, judge.grade([case for *_, case in further]), strict=True):
        found[place][name] = score
    return [
        Diagnosis(
            _thinking(scores),
            fine,
            None if fine else _error(bool(scores[-1]), said),
            sum(score is None for score in (*scores, *said.values())),
        )
        for scores, fine, said in zip(enough, right, found, strict=True)
    ]


def _last(trajectory: Trajectory) -> tuple[str, ...]:
    searches = shown_searches(trajectory)
    return searches[-1].titles if searches else ()


def _thinking(enough: Sequence[float | None]) -> str:
    if not enough[-1]:
        return UNDER
    return OVER if any(enough[:-1]) else GOOD


def _error(sufficient: bool, said: dict[str, float | None]) -> int:
    if not sufficient:
        return 0 if said["mistaken"] else 1
    if said["reached"]:
        return 3
    return 4 if said["faithful"] else 2


def report(found: Sequence[Diagnosis]) -> str:
    """Tables 1 and 2 of the paper: how many of each thinking were answered right and wrong, and the errors' shares."""
    counts = [
        [sum(d.thinking == kind and d.right == right for d in found) for right in (True, False)]
        for kind in THINKING
    ]
    rows = [("", "right", "wrong"), *((kind, *map(str, row)) for kind, row in zip(THINKING, counts))]
    wrong = [d.error for d in found if d.error is not None]
    errors = [("context    error", "number", "share")]
    for place, (context, kind) in enumerate(ERRORS):
        number = wrong.count(place)
        share = f"{100 * number / len(wrong):.1f} %" if wrong else "–"
        errors.append((f"{context:<12}  {kind}", str(number), share))
    unread = sum(d.unread for d in found)
    closing = [f"{unread} answers of the judge could not be read"] if unread else []
    return "\n".join(
        [
            f"{len(found)} trajectories",
            *table(rows),
            "",
            f"{len(wrong)} wrong answers",
            *table(errors),
            *closing,
        ]
    )
