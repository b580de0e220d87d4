"""Save and load trajectories as JSON lines: texts, searches and rewards, without tokens."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rrl.data.fields import fields_of
from rrl.data.questions import Question
from rrl.data.records import OnError, load_records
from rrl.data.trajectory import Search, Trajectory

ALLOWED = (
    "{question: {id, text, answers, kind, gold}, segments: [[role, text]], searches: [{turn, query, titles, ids, failed}], "
    "answer, ended, rewards, metrics}, as a run writes to trajectories.jsonl"
)
"""The format of a line, for error messages."""


def save_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write one JSON object per line; `load_trajectories` reads the trajectories back without tokens."""
    with Path(path).open("w", encoding="utf-8") as stream:
        for trajectory in trajectories:
            record = {
                "question": dataclasses.asdict(trajectory.question),
                "segments": trajectory.segments,
                "searches": searches_as_json(trajectory.searches),
                **{
                    name: getattr(trajectory, name)
                    for name in ("answer", "ended", "cuts", "rewards", "metrics")
                },
            }
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")


def searches_as_json(searches: Iterable[Search]) -> list[dict[str, Any]]:
    """Return searches as JSON objects, without the text of their passages."""
    names = ("turn", "query", "titles", "ids", "failed")
    return [{name: getattr(search, name) for name in names} for search in searches]


def load_trajectories(
    path: str | Path, on_error: OnError = "refuse", skipped: list[str] | None = None
) -> list[Trajectory]:
    """Read a file of `save_trajectories`; the token arrays of the trajectories are empty.

    Args:
      path: the file.
      on_error: "refuse" raises UserError at the first broken record; "skip" skips them and logs their number.
      skipped: if given, receives one "line 7: reason" for each skipped record.
    """
    return load_records(path, _trajectory, ALLOWED, on_error, skipped)


def _trajectory(position: int, record: Any) -> Trajectory:
    fields = fields_of(record)
    empty = np.zeros(0)
    try:
        question: dict[str, Any] = dict(fields["question"])
        question = {name: tuple(v) if isinstance(v, list) else v for name, v in question.items()}
        searches = [
            Search(**{**search, "titles": tuple(search["titles"]), "ids": tuple(search.get("ids", ()))})
            for search in fields["searches"]
        ]
        return Trajectory(
            question=Question(**question),
            request=position,
            group=position,
            tokens=empty,
            roles=empty,
            logps=empty,
            sampled_logps=empty,
            turns=empty,
            segments=[(int(role), str(text)) for role, text in fields["segments"]],
            searches=searches,
            ended=fields["ended"],
            cuts=tuple((int(turn), str(limit)) for turn, limit in fields.get("cuts", ())),
            rewards=fields["rewards"],
            metrics=fields["metrics"],
            answer=fields["answer"],
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a trajectory ({error!r})") from error
