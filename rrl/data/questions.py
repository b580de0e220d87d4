"""Questions with gold answers, and the question files that hold them, in their publishers' own forms."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rrl.data.records import OnError, fields_of, id_field, list_field, load_records, text_field

ALLOWED = (
    "{question, and answer (a string or a list), golden_answers or answers} with id, answer_aliases, type or kind, "
    "supporting_facts, paragraphs or gold where known"
)
"""The question forms that are understood; JSON lines or one JSON list, gzipped or not."""

ANSWER_FIELDS = ("answers", "golden_answers", "answer", "answer_aliases")


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """One question."""

    id: str
    text: str
    answers: tuple[str, ...]
    """Gold answers, any of which is right; the first is the main one."""
    kind: str = ""
    """The publisher's type ("compositional", "bridge", ...), or our own ("two_hop", ...)."""
    gold: tuple[str, ...] = ()
    """Titles of the supporting passages, where known."""


def load_questions(
    path: str | Path, on_error: OnError = "refuse", skipped: list[str] | None = None
) -> list[Question]:
    """Read a question file: FlashRAG, NQ-open, HotpotQA / 2Wiki, MuSiQue or our own form (see `ALLOWED`).

    Args:
      path: the file; gzip is recognised by content.
      on_error: "refuse" raises UserError at the first broken record; "skip" leaves them out and logs how many
        and where.
      skipped: if given, receives one "line 7: reason" for each record left out.
    """
    return load_records(path, _question, ALLOWED, on_error, skipped)


def save_questions(path: str | Path, questions: Iterable[Question]) -> None:
    """Write our own form, one JSON object a line; `load_questions` reads it back unchanged."""
    with Path(path).open("w", encoding="utf-8") as stream:
        for question in questions:
            stream.write(json.dumps(dataclasses.asdict(question), ensure_ascii=False) + "\n")


def _question(position: int, record: Any) -> Question:
    fields = fields_of(record)
    return Question(
        id=id_field(fields, position),
        text=text_field(fields, "question", "text"),
        answers=_answers(fields),
        kind=str(fields.get("kind") or fields.get("type") or ""),
        gold=_gold(fields),
    )


def _answers(fields: dict[str, Any]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for name in ANSWER_FIELDS:
        value = fields.get(name)
        for answer in [value] if isinstance(value, str) else list_field(fields, name):
            if not isinstance(answer, str):
                raise ValueError(f"{name}: got {answer!r}, not a string or a list of strings")
            if answer.strip():
                found.setdefault(answer.strip())
    if not found:
        raise ValueError(f"no gold answer in any of the fields {', '.join(ANSWER_FIELDS)}")
    return tuple(found)


def _gold(fields: dict[str, Any]) -> tuple[str, ...]:
    """Titles: our own form, HotpotQA's [title, sentence] pairs or plain titles, MuSiQue's supporting paragraphs."""
    titles: dict[str, None] = {}
    for fact in list_field(fields, "gold") or list_field(fields, "supporting_facts"):
        title = fact[0] if isinstance(fact, list) and fact else fact
        if not isinstance(title, str):
            raise ValueError(
                f"supporting_facts or gold: got {fact!r}, not a title or a [title, sentence] pair"
            )
        titles.setdefault(title)
    for paragraph in list_field(fields, "paragraphs"):
        if not isinstance(paragraph, dict) or not isinstance(paragraph.get("title", ""), str):
            raise ValueError("paragraphs: not a list of objects with a title")
        if paragraph.get("is_supporting"):
            titles.setdefault(paragraph.get("title", ""))
    return tuple(titles)
