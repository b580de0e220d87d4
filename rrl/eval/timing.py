"""How long an evaluation took, by stage: `timing.jsonl` of its workdir, a line for each stretch of questions."""

import json
import numbers
from pathlib import Path
from typing import Any

from rrl.eval.comparison import STAGES
from rrl.eval.result_card import versions_here
from rrl.eval.results import read_lines, whole_lines
from rrl.files import saving

FILE = "timing.jsonl"
_KINDS: dict[str, type] = {
    "commit": str,
    "judged": str,
    "versions": dict,
    **dict.fromkeys(("questions", *STAGES), numbers.Real),
}


def append_timing(
    workdir: Path, questions: int, judged: str = "", commit: str = "", **seconds: float
) -> None:
    """Adds a line: the seconds that each stage took for so many questions, of which judge (its file of verdicts), or by which
    code. Raises SaveError."""
    named = {"judged": judged, "commit": commit, "versions": versions_here() if commit else {}}
    line = {"questions": questions} | {name: value for name, value in named.items() if value} | seconds
    with saving(workdir / FILE):
        whole_lines(workdir / FILE)
        with (workdir / FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


def read_timing(workdir: Path) -> list[dict[str, Any]]:
    """The lines. Raises UserError that names one which is none of `append_timing`'s."""
    return read_lines(workdir / FILE, "questions", kinds=_KINDS)


def latency(workdir: Path, judged: str = "") -> dict[str, float]:
    """Seconds a question by stage, over the stretches that came to an end; the engine answers many questions at a time.

    "answer" is all of the rollout; searches that ran side by side with it and with each other are added up in "search"; "read"
    is of the model that answers from what was found (R2AG's generator). "judge" is of the judge whose file of verdicts is
    `judged`.
    """
    lines = read_timing(workdir)
    found = {}
    for stage in STAGES:
        mine = [line for line in lines if stage != "judge" or line.get("judged") == judged != ""]
        timed = [line for line in mine if stage in line and line["questions"]]
        if timed:
            found[stage] = sum(line[stage] for line in timed) / sum(line["questions"] for line in timed)
    return found
