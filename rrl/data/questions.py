"""Read questions with gold answers from files in the formats of their publishers. Read `load_questions` first."""

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rrl.data.decoding import BrokenRecord, decompressed_name
from rrl.data.field_names import ANSWER_FIELDS, QUESTION_FIELDS
from rrl.data.fields import fields_of, id_field, list_field, question_fields_of, text_field
from rrl.data.gold_answers import OnUnanswerable, choices_of, gold_answers
from rrl.data.gold_passages import GOLD_IDS, GOLD_PASSAGES, gold_ids, gold_titles
from rrl.data.records import TABLE_ENDINGS, OnError, load_records, read_records
from rrl.errors import UserError

ALLOWED = (
    f"a question (one of {', '.join(QUESTION_FIELDS)}) and answers (one of {', '.join(ANSWER_FIELDS)}, or KILT's output) with "
    "id, type or kind, supporting_facts, evidence_list, paragraphs, gold or gold_ids if known, at the top level or in metadata; "
    "choices or choice_A, choice_B, ...; columns of these names in TSV or CSV"
)
"""The supported question formats, for error messages. JSON lines, one JSON list or a table; plain, gzip or bzip2."""

KIND_FIELDS = ("kind", "type", "question_type", "domain")
"""Names of the field with the kind of a question; the first with a value is used."""
METADATA = (
    *KIND_FIELDS,
    *GOLD_IDS,
    *GOLD_PASSAGES,
    "supporting_facts",
    "paragraphs",
    "question_decomposition",
    "evidence_list",
    "answerable",
    "is_impossible",
)
"""Fields that FlashRAG stores in `metadata`. They are used if the record itself does not have them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A question with its gold answers and gold passages."""

    id: str
    text: str
    answers: tuple[str, ...]
    """Gold answers. Each is correct; the first is the main one. For a multiple-choice question, letters."""
    kind: str = ""
    """The publisher's type ("compositional", "bridge", ...), or that of a question of `rrl.miniwiki` ("two_hop", ...)."""
    gold: tuple[str, ...] = ()
    """Titles of the gold passages; empty if unknown."""
    hops: int = 0
    """Number of hops as published (MuSiQue); 0 if unknown."""
    choices: tuple[str, ...] = ()
    """Texts of the choices A, B, ... of a multiple-choice question; empty for any other question."""
    gold_ids: tuple[str, ...] = ()
    """Ids of the gold passages in their corpus; empty if unknown."""


def load_questions(
    path: str | Path,
    on_error: OnError = "refuse",
    skipped: list[str] | None = None,
    truth: str | Path | None = None,
    answers_optional: bool = False,
    unanswerable: OnUnanswerable = "leave_out",
) -> list[Question]:
    """Read a question file: FlashRAG, NQ-open, HotpotQA / 2Wiki, MuSiQue, TriviaQA, PopQA, Bamboogle, MultiHop-RAG, SQuAD, KILT,
    LongBench, DPR, StrategyQA, SimpleQA, FRAMES, BrowseComp-Plus or the format of `save_questions` (see `ALLOWED`).

    Args:
      path: the file; gzip and bzip2 are recognised by content.
      on_error: "refuse" raises UserError at the first broken record; "skip" skips them and logs how many and where.
      skipped: if given, receives one "line 7: reason" for each skipped record.
      truth: a file with the gold answers, if the question file has none: {id: {answer, evidence_list}} (MultiHop-RAG).
      answers_optional: True: a question without a gold answer has `answers == ()`. False: it is a broken record.
      unanswerable: how to treat a question that its publisher marks as unanswerable (`answerable` false, `is_impossible`
        true, or SQuAD's empty list of answers): "leave_out" excludes it and logs the number, "empty" makes the empty answer
        the gold answer. With `answers_optional=True` this has no effect: such a question has `answers == ()`.
    """
    answers = _truth(truth) if truth is not None else {}

    def parse(position: int, record: Any) -> Question:
        if truth is not None:
            identity = id_field(fields_of(record), position)
            if identity not in answers:
                raise ValueError(f"id: {identity!r} has no answer in {truth}")
            record = answers[identity] | record
        return question_of(position, record, answers_optional, unanswerable)

    return _booleans_as_words(path, load_records(path, parse, ALLOWED, on_error, skipped))


def _booleans_as_words(path: str | Path, questions: list[Question]) -> list[Question]:
    """Replace the answers "true" and "false" of a table by "yes" and "no", if every question has one of them and both occur.

    JSON files have booleans instead, which `answer_text` replaces. Other questions are returned unchanged.
    """
    words = {"true": ("yes",), "false": ("no",)}
    if not decompressed_name(Path(path)).endswith(TABLE_ENDINGS):
        return questions
    new_answers = [words.get(q.answers[0].lower()) if len(q.answers) == 1 else None for q in questions]
    if None in new_answers or len(set(new_answers)) < 2:
        return questions
    return [
        dataclasses.replace(q, answers=answer)
        for q, answer in zip(questions, new_answers, strict=True)
        if answer
    ]


def lacks_answers(path: str | Path) -> bool:
    """Return whether a file has questions, but no gold answer.

    False for an empty file, and if a broken record comes before the first answer: `load_questions` reports both.
    """
    empty = True
    for position, (_, record) in enumerate(read_records(path)):
        empty = False
        try:
            if (
                isinstance(record, BrokenRecord)
                or question_of(position, record, answers_optional=True).answers
            ):
                return False
        except ValueError:
            return False
    return not empty


def _truth(path: str | Path) -> dict[str, dict[str, Any]]:
    """Read a file of gold answers (`truth` of `load_questions`) as fields by question id."""
    answers_by_id: dict[str, dict[str, Any]] = {}
    for position, (place, record) in enumerate(read_records(path)):
        try:
            if isinstance(record, BrokenRecord):
                raise ValueError(record.reason)
            fields = fields_of(record)
            identity = id_field(fields, position)
            if identity in answers_by_id:
                raise ValueError(f"id: {identity!r} occurs twice")
        except ValueError as error:
            raise UserError(
                f"{path}, {place}: {error}. Allowed: {{id: {{answer, ...}}}}, or a list of {{id, answer, ...}}."
            ) from error
        answers_by_id[identity] = fields
    return answers_by_id


def with_choices(question: Question, *, instruct: bool = True) -> str:
    """Return the text of a question as the model reads it: with its choices if it has any.

    Args:
      question: the question.
      instruct: whether to ask for the letter of a choice; False for prompts that do not ask for the answer.
    """
    letters = [f"({chr(ord('A') + at)}) {choice}" for at, choice in enumerate(question.choices)]
    instruction = ["Answer with the letter of the right choice."] if letters and instruct else []
    return "\n".join([question.text, *letters, *instruction])


def as_prompted(question: Question) -> Question:
    """Return a question as prompts show it: the text includes the choices, and `choices` is empty."""
    return (
        dataclasses.replace(question, text=with_choices(question), choices=())
        if question.choices
        else question
    )


def save_questions(path: str | Path, questions: Iterable[Question]) -> None:
    """Write one JSON object per line; `load_questions` reads the questions back unchanged."""
    with Path(path).open("w", encoding="utf-8") as stream:
        for question in questions:
            stream.write(json.dumps(dataclasses.asdict(question), ensure_ascii=False) + "\n")


def question_of(
    position: int, record: Any, answers_optional: bool = False, unanswerable: OnUnanswerable = "leave_out"
) -> Question:
    """Return the question of a record (see `ALLOWED`); `answers_optional` and `unanswerable` as in `load_questions`.

    Raises ValueError that names what is wrong, such as no gold answer, and ExcludedRecord if the publisher marks the question
    as unanswerable.
    """
    fields = question_fields_of(record)
    metadata = fields.get("metadata")
    if isinstance(metadata, dict):
        fields = {name: metadata[name] for name in METADATA if name in metadata} | fields
    identity, choices = id_field(fields, position), choices_of(fields)
    # "text" is also a question field. A record with a title and a text, but no answer, comes from a corpus file.
    if "title" in fields and not {*QUESTION_FIELDS, *ANSWER_FIELDS} - {"text"} & fields.keys():
        raise ValueError("text: the record has a title and no answer: a passage, not a question")
    return Question(
        id=identity,
        text=text_field(fields, *QUESTION_FIELDS),
        answers=gold_answers(fields, choices, answers_optional, unanswerable),
        kind=next((str(fields[name]) for name in KIND_FIELDS if fields.get(name)), ""),
        gold=tuple(dict.fromkeys(gold_titles(fields))),
        hops=_hops(fields, identity),
        choices=choices,
        gold_ids=tuple(dict.fromkeys(gold_ids(fields))),
    )


def _hops(fields: dict[str, Any], identity: str) -> int:
    """Return the field `hops`, the length of MuSiQue's decomposition, or the number in MuSiQue's ids ("3hop1__...")."""
    stated = fields.get("hops")
    if isinstance(stated, int) and not isinstance(stated, bool) and stated >= 0:
        return stated
    if stated is not None:
        raise ValueError(f"hops: got {stated!r}, not a whole number")
    if steps := list_field(fields, "question_decomposition"):
        return len(steps)
    hops_in_id = re.match(r"(\d)hop\d?__", identity)
    return int(hops_in_id[1]) if hops_in_id else 0
