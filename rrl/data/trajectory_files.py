"""Trajectories as JSON lines, for whoever reads them later: the words, the searches, what was earned; no tokens."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rrl.data.questions import Question
from rrl.data.records import OnError, fields_of, load_records
from rrl.data.trajectory import Search, Trajectory

ALLOWED = (
    "{question: {id, text, answers, kind, gold}, segments: [[role, text]], searches: [{turn, query, titles, ids, failed}], "
    "answer, ended, rewards, metrics}, as a run writes to trajectories.jsonl"
)


def save_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Writes one JSON object a line; `load_trajectories` reads them back, but for their tokens."""
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
    """Searches without the text of what they found."""
    names = ("turn", "query", "titles", "ids", "failed")
    return [{name: getattr(search, name) for name in names} for search in searches]


def load_trajectories(
    path: str | Path, on_error: OnError = "refuse", skipped: list[str] | None = None
) -> list[Trajectory]:
    """Reads what `save_trajectories` wrote; token arrays are empty.

    `on_error` "refuse" raises UserError at the first broken record; "skip" leaves them out, into `skipped` if given.
    """
    return load_records(path, _trajectory, ALLOWED, on_error, skipped)


def _trajectory(position: int, record: Any) -> Trajectory:
    fields = fields_of(record)
    none = np.zeros(0)
    try:
        asked: dict[str, Any] = dict(fields["question"])
        asked = {name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()}
        searches = [
            Search(**{**search, "titles": tuple(search["titles"]), "ids": tuple(search.get("ids", ()))})
            for search in fields["searches"]
        ]
        return Trajectory(
            Question(**asked),
            position,
            position,
            *(none, none, none, none, none),
            segments=[(int(role), str(text)) for role, text in fields["segments"]],
            searches=searches,
            ended=fields["ended"],
            cuts=tuple((int(turn), str(limit)) for turn, limit in fields.get("cuts", ())),
            rewards=fields["rewards"],
            metrics=fields["metrics"],
            answer=fields["answer"],
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no trajectory ({error!r})") from error
