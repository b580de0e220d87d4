"""Read questions with gold answers from files in the formats of their publishers. Read `load_questions` first."""

import dataclasses
import json
import math
import re
import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from rrl.data.decoding import BrokenRecord, decompressed_name
from rrl.data.field_names import ANSWER_FIELDS, PASSAGE_ID_FIELDS, QUESTION_FIELDS
from rrl.data.fields import fields_of, id_field, list_field, list_in_text, question_fields_of, text_field
from rrl.data.records import TABLE_ENDINGS, ExcludedRecord, OnError, load_records, read_records
from rrl.errors import UserError

ALLOWED = (
    f"a question (one of {', '.join(QUESTION_FIELDS)}) and answers (one of {', '.join(ANSWER_FIELDS)}, or KILT's output) with "
    "id, type or kind, supporting_facts, evidence_list, paragraphs, gold or gold_ids if known, at the top level or in metadata; "
    "choices or choice_A, choice_B, ...; columns of these names in TSV or CSV"
)
"""The supported question formats, for error messages. JSON lines, one JSON list or a table; plain, gzip or bzip2."""

LIST_AS_TEXT_FIELDS = ("answers", "golden_answers", "answer_aliases", "possible_answers", "reference")
"""Fields of `ANSWER_FIELDS` whose value may be a list written as text, such as a table cell '["a", "b"]'."""
OnUnanswerable = Literal["leave_out", "empty"]
"""How to treat questions that their publisher marks as unanswerable; see `load_questions`."""
EMPTY_ANSWER = ("",)
"""Gold answers of an unanswerable question that is loaded with "empty": the empty answer is correct."""
KIND_FIELDS = ("kind", "type", "question_type", "domain")
"""Names of the field with the kind of a question; the first with a value is used."""
GOLD_IDS = (
    "gold_ids",
    "gold_doc_ids",
    "gold_pids",
    "relevant_docids",
    "relevant_doc_ids",
    "positive_ids",
    "answer_pids",
)
"""Fields with ids of gold passages: `gold_ids` is written by `save_questions` and BRIGHT, `answer_pids` by LoTTE."""
GOLD_PASSAGES = ("evidence_docs", "gold_docs", "gold_passages", "positive_passages", "positive_ctxs")
"""Fields with gold passages that have ids or titles. The first two are BrowseComp-Plus's: its recall metric counts
`evidence_docs`. The others are Tevatron's and DPR's."""
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
    unanswered: bool = False,
    unanswerable: OnUnanswerable = "leave_out",
) -> list[Question]:
    """Read a question file: FlashRAG, NQ-open, HotpotQA / 2Wiki, MuSiQue, TriviaQA, PopQA, Bamboogle, MultiHop-RAG, SQuAD, KILT,
    LongBench, DPR, StrategyQA, SimpleQA, FRAMES, BrowseComp-Plus or the format of `save_questions` (see `ALLOWED`).

    Args:
      path: the file; gzip and bzip2 are recognised by content.
      on_error: "refuse" raises UserError at the first broken record; "skip" skips them and logs how many and where.
      skipped: if given, receives one "line 7: reason" for each skipped record.
      truth: a file with the gold answers, if the question file has none: {id: {answer, evidence_list}} (MultiHop-RAG).
      unanswered: True: a question without a gold answer has `answers == ()`. False: it is a broken record.
      unanswerable: how to treat a question that its publisher marks as unanswerable (`answerable` false, `is_impossible`
        true, or SQuAD's empty list of answers): "leave_out" excludes it and logs the number, "empty" makes the empty answer
        the gold answer. With `unanswered=True` this has no effect: such a question has `answers == ()`.
    """
    answers = _truth(truth) if truth is not None else {}

    def parse(position: int, record: Any) -> Question:
        if truth is not None:
            identity = id_field(fields_of(record), position)
            if identity not in answers:
                raise ValueError(f"id: {identity!r} has no answer in {truth}")
            record = answers[identity] | record
        return question_of(position, record, unanswered, unanswerable)

    return _booleans_as_words(path, load_records(path, parse, ALLOWED, on_error, skipped))


def _booleans_as_words(path: str | Path, questions: list[Question]) -> list[Question]:
    """Return the questions of a table whose answers are all "true" or "false" with the answers "yes" and "no", as for JSON."""
    words = {"true": ("yes",), "false": ("no",)}
    if not decompressed_name(Path(path)).endswith(TABLE_ENDINGS):
        return questions
    found = [words.get(q.answers[0].lower()) if len(q.answers) == 1 else None for q in questions]
    if None in found or len(set(found)) < 2:
        return questions
    return [
        dataclasses.replace(q, answers=answer) for q, answer in zip(questions, found, strict=True) if answer
    ]


def has_answers(path: str | Path) -> bool:
    """Return whether a question file has any gold answer.

    Also True for an empty file and for one with a broken record before the first answer: `load_questions` then raises an error
    that says what is wrong.
    """
    empty = True
    for position, (_, record) in enumerate(read_records(path)):
        empty = False
        try:
            if isinstance(record, BrokenRecord) or question_of(position, record, unanswered=True).answers:
                return True
        except ValueError:
            return True
    return empty


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


def with_choices(question: Question) -> str:
    """Return the text of a question as the model reads it: with its choices if it has any."""
    letters = [f"({chr(ord('A') + at)}) {choice}" for at, choice in enumerate(question.choices)]
    hint = ["Answer with the letter of the right choice."] if letters else []
    return "\n".join([question.text, *letters, *hint])


def save_questions(path: str | Path, questions: Iterable[Question]) -> None:
    """Write one JSON object per line; `load_questions` reads the questions back unchanged."""
    with Path(path).open("w", encoding="utf-8") as stream:
        for question in questions:
            stream.write(json.dumps(dataclasses.asdict(question), ensure_ascii=False) + "\n")


def question_of(
    position: int, record: Any, unanswered: bool = False, unanswerable: OnUnanswerable = "leave_out"
) -> Question:
    """Return the question of a record (see `ALLOWED`); `unanswered` and `unanswerable` as in `load_questions`.

    Raises ValueError that names what is wrong, such as no gold answer, and ExcludedRecord if the publisher marks the question
    as unanswerable.
    """
    fields = question_fields_of(record)
    metadata = fields.get("metadata")
    if isinstance(metadata, dict):
        fields = {name: metadata[name] for name in METADATA if name in metadata} | fields
    identity, choices = id_field(fields, position), _choices(fields)
    # "text" is also a question field. A record with a title and a text, but no answer, comes from a corpus file.
    if "title" in fields and not {*QUESTION_FIELDS, *ANSWER_FIELDS} - {"text"} & fields.keys():
        raise ValueError("text: the record has a title and no answer: a passage, not a question")
    return Question(
        id=identity,
        text=text_field(fields, *QUESTION_FIELDS),
        answers=_answers(fields, choices, unanswered, unanswerable),
        kind=next((str(fields[name]) for name in KIND_FIELDS if fields.get(name)), ""),
        gold=tuple(dict.fromkeys(_gold_titles(fields))),
        hops=_hops(fields, identity),
        choices=choices,
        gold_ids=tuple(dict.fromkeys(_gold_ids(fields))),
    )


def _answers(
    fields: dict[str, Any], choices: tuple[str, ...], unanswered: bool, unanswerable: OnUnanswerable
) -> tuple[str, ...]:
    """Return the gold answers of a question, as letters if it has choices."""
    if _unanswerable(fields):
        if unanswered:
            return ()
        if unanswerable == "empty":
            return EMPTY_ANSWER
        raise ExcludedRecord("its publisher marks it as unanswerable")
    gold_answers: dict[str, None] = {}
    for name in (*ANSWER_FIELDS, "output"):
        for answer in _answer_values(fields, name):
            if choices and type(answer) is int and 0 <= answer < len(choices):
                answer = string.ascii_uppercase[answer]  # FlashRAG's golden_answers are indices of choices
            if answer is None:
                continue
            text = answer_text(name, answer)
            if text.strip():
                gold_answers.setdefault(_letter(name, text.strip(), choices) if choices else text.strip())
    if not gold_answers and not unanswered:
        raise ValueError(
            f"no gold answer in any of the fields {', '.join(ANSWER_FIELDS)}; found the fields {', '.join(list(fields)[:8])}"
        )
    return tuple(gold_answers)


def answer_text(name: str, answer: Any) -> str:
    """Return an answer as text: numbers in decimal, true and false as yes and no. Raises ValueError for other types."""
    if isinstance(answer, bool):
        return "yes" if answer else "no"
    if isinstance(answer, float) and math.isfinite(answer):
        return str(int(answer)) if answer.is_integer() else repr(answer)
    if isinstance(answer, int):
        return str(answer)
    if not isinstance(answer, str):
        raise ValueError(f"{name}: got {answer!r:.60}, not a string, a number, true, false or a list of them")
    return answer


def _unanswerable(fields: dict[str, Any]) -> bool:
    """Return whether the publisher marks a question as unanswerable from its passages.

    The marks are MuSiQue-Full's `answerable`, SQuAD 2's `is_impossible`, and the empty list of answers in the datasets library.
    Tables hold them as words.
    """
    words = {name: str(fields.get(name)).strip().lower() for name in ("answerable", "is_impossible")}
    if words["answerable"] in ("false", "no", "0", "0.0") or words["is_impossible"] in (
        "true",
        "yes",
        "1",
        "1.0",
    ):
        return True
    answers = fields.get("answers")
    return isinstance(answers, dict) and answers.get("text") == []


def _letter(name: str, answer: str, choices: tuple[str, ...]) -> str:
    """Return the letter of the choice that an answer names by its letter or by its text."""
    letters = string.ascii_uppercase[: len(choices)]
    if len(answer) == 1 and answer.upper() in letters:
        return answer.upper()
    matches = [
        letter for letter, choice in zip(letters, choices, strict=True) if choice.strip() == answer.strip()
    ]
    if not matches:
        raise ValueError(
            f"{name}: got {answer!r}, neither a letter from A to {letters[-1]} nor one of the choices"
        )
    return matches[0]


_ANSWER_KEYS = (("Value", "Aliases"), ("value", "aliases"), ("", "text"), ("text", ""), ("answer", ""))
"""(key of one answer, key of a list of answers) in an answer object; "" if the format has no such key. In order: TriviaQA's file,
TriviaQA and SQuAD in the datasets library, SQuAD's file, KILT's file."""


def _answer_values(fields: dict[str, Any], name: str) -> list[Any]:
    """Return the answers in a field, which may be a value, a list, an object or a list written as text."""
    value = fields.get(name)
    if name == "output":
        # KILT's gold answers are objects. In a file of predictions, `output` is the text that a model wrote.
        entries = value if isinstance(value, list) else []
        return [entry["answer"] for entry in entries if isinstance(entry, dict) and "answer" in entry]
    if isinstance(value, dict):
        return _answers_in_object(name, value)
    if isinstance(value, str) and name in LIST_AS_TEXT_FIELDS:
        try:
            listed = list_in_text(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if listed is None and name == "possible_answers":
            raise ValueError(f"{name}: got {value!r:.60}, not a list in JSON")
        value = value if listed is None else listed
    if isinstance(value, list):
        return [
            inner
            for entry in value
            for inner in (_answers_in_object(name, entry) if isinstance(entry, dict) else [entry])
        ]
    return [] if value is None else [value]


def _answers_in_object(name: str, value: dict[str, Any]) -> list[Any]:
    """Return the answers of an object. Raises ValueError for an unknown format, since its answers would be lost."""
    for single, several in _ANSWER_KEYS:
        if several in value and isinstance(value[several], list):
            return [*([value[single]] if single in value else []), *value[several]]
        if single in value and not isinstance(value[single], list | dict):
            return [value[single]]
    raise ValueError(f"{name}: got an object with the fields {', '.join(list(value)[:8])}, not an answer")


def _choices(fields: dict[str, Any]) -> tuple[str, ...]:
    """Return the choices of a multiple-choice question, from `choice_A`, `choice_B`, ... or the list `choices`."""
    names = [f"choice_{letter}" for letter in string.ascii_uppercase if f"choice_{letter}" in fields]
    texts = [fields[name] for name in names] or list_field(fields, "choices")
    if not all(isinstance(choice, str) for choice in texts) or len(texts) > len(string.ascii_uppercase):
        raise ValueError("choices: not a list of at most 26 strings")
    return tuple(texts)


def _gold_titles(fields: dict[str, Any]) -> Iterator[str]:
    """Yield titles of gold passages.

    Sources: `gold` (the format of `save_questions`), HotpotQA's [title, sentence] pairs or plain titles, MuSiQue's supporting
    paragraphs, KILT's provenance, `GOLD_PASSAGES`, and MultiHop-RAG's evidence.
    """
    facts = fields.get("supporting_facts")
    if isinstance(facts, dict):
        # The datasets library stores parallel lists.
        fields = fields | {"supporting_facts": list_field(facts, "title")}
    for fact in list_field(fields, "gold") or list_field(fields, "supporting_facts"):
        title = fact[0] if isinstance(fact, list) and fact else fact
        if not isinstance(title, str):
            raise ValueError(
                f"supporting_facts or gold: got {fact!r}, not a title or a [title, sentence] pair"
            )
        yield title
    for name in ("paragraphs", "contexts"):
        for paragraph in list_field(fields, name):
            if not isinstance(paragraph, dict) or not isinstance(paragraph.get("title", ""), str | None):
                raise ValueError(f"{name}: not a list of objects with a title")
            if paragraph.get("is_supporting") and paragraph.get("title"):
                yield paragraph["title"]
    for source in (*_provenance(fields), *_gold_passages(fields)):
        if isinstance(source.get("title"), str) and source["title"]:
            yield source["title"]
    for evidence in list_field(fields, "evidence_list"):
        yield text_field(fields_of(evidence), "title")


def _gold_ids(fields: dict[str, Any]) -> Iterator[str]:
    """Yield ids of gold passages: `GOLD_IDS`, `GOLD_PASSAGES`, MuSiQue's supporting paragraphs, KILT's provenance."""
    for name in GOLD_IDS:
        value = fields.get(name)
        if isinstance(value, str) and not value.strip().startswith("["):
            value = [value.strip()] if value.strip() else []
        for identity in [value] if isinstance(value, int) else list_field(fields | {name: value}, name):
            if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
                raise ValueError(f"{name}: got {identity!r:.60}, not the id of a passage")
            yield str(identity)
    supporting = (
        paragraph
        for name in ("paragraphs", "contexts")
        for paragraph in list_field(fields, name)
        if paragraph.get("is_supporting")
    )
    for passage in (*_gold_passages(fields), *supporting):
        if any(passage.get(name) not in (None, "") for name in PASSAGE_ID_FIELDS):
            yield id_field(passage, 0, PASSAGE_ID_FIELDS)
    for source in _provenance(fields):
        if source.get("wikipedia_id") is not None:
            yield str(source["wikipedia_id"])


def _gold_passages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the passages of the first non-empty field of `GOLD_PASSAGES`."""
    for name in GOLD_PASSAGES:
        value = fields.get(name)
        if (
            passages := [entry for entry in value if isinstance(entry, dict)]
            if isinstance(value, list)
            else []
        ):
            return passages
    return []


def _provenance(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the sources of KILT's answers. KILT's question is the field `input`; without it, `output` is a model's text."""
    for output in list_field(fields, "output") if "input" in fields else ():
        for source in list_field(output, "provenance") if isinstance(output, dict) else ():
            if isinstance(source, dict):
                yield source


def _hops(fields: dict[str, Any], identity: str) -> int:
    """Return the field `hops`, the length of MuSiQue's decomposition, or the number in MuSiQue's ids ("3hop1__...")."""
    stated = fields.get("hops")
    if isinstance(stated, int) and not isinstance(stated, bool) and stated >= 0:
        return stated
    if stated is not None:
        raise ValueError(f"hops: got {stated!r}, not a whole number")
    if steps := list_field(fields, "question_decomposition"):
        return len(steps)
    named = re.match(r"(\d)hop\d?__", identity)
    return int(named[1]) if named else 0
