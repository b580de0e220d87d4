"""Seconds of an evaluation by stage: `timing.jsonl` in its workdir has a line for each batch of questions."""

import json
import numbers
from pathlib import Path
from typing import Any

from rrl.eval.provenance import installed_versions
from rrl.eval.results import drop_partial_line, read_lines
from rrl.files import saving

FILE = "timing.jsonl"
STAGES = ("answer", "search", "read", "judge")
"""Stages of an evaluation whose seconds are measured: the rollout, its searches, the reader model, and the judge."""
_FIELD_TYPES: dict[str, type] = {
    "commit": str,
    "judged": str,
    "policy_format": str,
    "reader_format": str,
    "versions": dict,
    **dict.fromkeys(("questions", *STAGES), numbers.Real),
}
"""Type of each field of a line. "judged" is the name of the judge's file of verdicts."""


def append_timing(
    workdir: Path,
    questions: int,
    verdicts_name: str = "",
    commit: str = "",
    policy_format: str = "",
    reader_format: str = "",
    **seconds: float,
) -> None:
    """Append a line with the seconds of each stage for a batch of questions.

    Args:
      workdir: folder of the run.
      questions: number of questions in the batch.
      verdicts_name: name of the judge's file of verdicts, for the stage "judge".
      commit: commit of the code that answered.
      policy_format: number format of the policy's matrix products (`Engine.product_format`).
      reader_format: that of the reader.
      **seconds: seconds by stage.

    Raises SaveError.
    """
    formats = {"policy_format": policy_format, "reader_format": reader_format}
    versions = installed_versions() if commit else {}
    named = {"judged": verdicts_name, "commit": commit, "versions": versions} | formats
    line = {"questions": questions} | {name: value for name, value in named.items() if value} | seconds
    with saving(workdir / FILE):
        drop_partial_line(workdir / FILE)
        with (workdir / FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


def read_timing(workdir: Path) -> list[dict[str, Any]]:
    """Return the lines. Raises UserError, which names the line, if `append_timing` cannot have written it."""
    return read_lines(workdir / FILE, "questions", types=_FIELD_TYPES)


def seconds_per_question(workdir: Path, verdicts_name: str = "") -> dict[str, float]:
    """Return seconds per question by stage: the time of all complete batches, divided by their number of questions.

    The engine answers many questions at a time, so this is not the time that one question takes.

    "answer" is the whole rollout. "search" is the sum of the durations of all searches, which run in parallel with the rollout
    and with each other; with several schedulers (one per data shard) it is the largest of their sums.
    "read" is the reader model (R2AG's generator). "judge" is the judge whose file of verdicts is `verdicts_name`.
    """
    lines = read_timing(workdir)
    means = {}
    for stage in STAGES:
        candidates = lines
        if stage == "judge":
            candidates = [line for line in lines if verdicts_name and line.get("judged") == verdicts_name]
        timed = [line for line in candidates if stage in line and line["questions"]]
        if timed:
            means[stage] = sum(line[stage] for line in timed) / sum(line["questions"] for line in timed)
    return means
