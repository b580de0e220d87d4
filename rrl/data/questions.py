"""Questions with gold answers, and the question files that hold them, in their publishers' own forms."""

import dataclasses
import json
import math
import re
import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from rrl.data.decoding import BrokenRecord
from rrl.data.records import (
    ExcludedRecord,
    OnError,
    asked_fields_of,
    fields_of,
    id_field,
    list_field,
    list_in_text,
    load_records,
    read_records,
    text_field,
)
from rrl.data.tables import ANSWERS, PASSAGE_IDS, QUESTIONS
from rrl.errors import UserError

ALLOWED = (
    f"a question (one of {', '.join(QUESTIONS)}) and answers (one of {', '.join(ANSWERS)}, or KILT's output) with id, type or "
    "kind, supporting_facts, evidence_list, paragraphs, gold or gold_ids where known, in metadata or beside it; choices or "
    "choice_A, choice_B, ...; columns of these names in TSV or CSV"
)
"""The question forms that are understood; JSON lines, one JSON list or a table; plain, gzip or bzip2."""

QUESTION_FIELDS = QUESTIONS
ANSWER_FIELDS = ANSWERS
LISTED_AS_TEXT = ("answers", "golden_answers", "answer_aliases", "possible_answers", "reference")
"""Fields of `ANSWER_FIELDS` that a table holds as the text of a list."""
Unanswerable = Literal["leave_out", "empty"]
UNANSWERABLE = ("",)
"""The gold answers of a question whose right answer is none."""
KIND_FIELDS = ("kind", "type", "question_type", "domain")
GOLD_IDS = ("gold_ids", "gold_doc_ids", "relevant_docids", "answer_pids")
"""Lists of ids of gold passages: our own and BRIGHT's, ..., LoTTE's."""
GOLD_PASSAGES = ("evidence_docs", "gold_docs", "positive_passages", "positive_ctxs")
"""Lists of gold passages with ids or titles: BrowseComp-Plus' two (its recall is that of the first), Tevatron's, DPR's."""
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
"""What FlashRAG keeps in `metadata`; it counts where the record itself does not have it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """One question."""

    id: str
    text: str
    answers: tuple[str, ...]
    """Gold answers, any of which is right; the first is the main one. Of a multiple choice, letters."""
    kind: str = ""
    """The publisher's type ("compositional", "bridge", ...), or our own ("two_hop", ...)."""
    gold: tuple[str, ...] = ()
    """Titles of the supporting passages, where known."""
    hops: int = 0
    """Steps that the publisher says it takes (MuSiQue); 0 where it does not say."""
    choices: tuple[str, ...] = ()
    """What to choose from; the first is A. Empty where the answer is free."""
    gold_ids: tuple[str, ...] = ()
    """Ids of the supporting passages in their corpus, where known."""


def load_questions(
    path: str | Path,
    on_error: OnError = "refuse",
    skipped: list[str] | None = None,
    truth: str | Path | None = None,
    unanswered: bool = False,
    unanswerable: Unanswerable = "leave_out",
) -> list[Question]:
    """Read a question file: FlashRAG, NQ-open, HotpotQA / 2Wiki, MuSiQue, TriviaQA, PopQA, Bamboogle, MultiHop-RAG, SQuAD, KILT,
    LongBench, DPR, StrategyQA, SimpleQA, FRAMES, BrowseComp-Plus or our own form (see `ALLOWED`).


    Args:
      path: the file; gzip and bzip2 are recognised by content.
      on_error: "refuse" raises UserError at the first broken record; "skip" leaves them out and logs how many
        and where.
      skipped: if given, receives one "line 7: reason" for each record left out.
      truth: a file with the answers of questions that come without, {id: {answer, evidence_list}} (MultiHop-RAG's form).
      unanswered: a question without a gold answer is read too, and has none; otherwise it is a broken record.
      unanswerable: what becomes of a question that its publisher marks so (`answerable` false, `is_impossible` true, SQuAD's
        empty list of answers): "leave_out" logs their number, "empty" reads an empty text as the right answer. With `unanswered`
        it is read and has no answer.
    """
    answers = _truth(truth) if truth is not None else {}

    def parse(position: int, record: Any) -> Question:
        if truth is not None:
            identity = id_field(fields_of(record), position)
            if identity not in answers:
                raise ValueError(f"id: {identity!r} has no answer in {truth}")
            record = answers[identity] | record
        return question_of(position, record, unanswered, unanswerable)

    return load_records(path, parse, ALLOWED, on_error, skipped)


def has_answers(path: str | Path) -> bool:
    """Whether a question file has any gold answer. True also for one that cannot be read, whose fault `load_questions` names."""
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
    found: dict[str, dict[str, Any]] = {}
    for position, (place, record) in enumerate(read_records(path)):
        try:
            if isinstance(record, BrokenRecord):
                raise ValueError(record.reason)
            fields = fields_of(record)
            identity = id_field(fields, position)
            if identity in found:
                raise ValueError(f"id: {identity!r} occurs twice")
        except ValueError as error:
            raise UserError(
                f"{path}, {place}: {error}. Allowed: {{id: {{answer, ...}}}}, or a list of {{id, answer, ...}}."
            ) from error
        found[identity] = fields
    return found


def with_choices(question: Question) -> str:
    """The question as it is shown, with its choices where it has any."""
    letters = [f"({chr(ord('A') + at)}) {choice}" for at, choice in enumerate(question.choices)]
    hint = ["Answer with the letter of the right choice."] if letters else []
    return "\n".join([question.text, *letters, *hint])


def save_questions(path: str | Path, questions: Iterable[Question]) -> None:
    """Write our own form, one JSON object a line; `load_questions` reads it back unchanged."""
    with Path(path).open("w", encoding="utf-8") as stream:
        for question in questions:
            stream.write(json.dumps(dataclasses.asdict(question), ensure_ascii=False) + "\n")


def question_of(
    position: int, record: Any, unanswered: bool = False, unanswerable: Unanswerable = "leave_out"
) -> Question:
    """The question that a record holds (see `ALLOWED`); `unanswered` and `unanswerable` as in `load_questions`.

    ValueError names what is wrong, such as no gold answer; ExcludedRecord: its publisher marks it as unanswerable.
    """
    fields = asked_fields_of(record)
    metadata = fields.get("metadata")
    if isinstance(metadata, dict):
        fields = {name: metadata[name] for name in METADATA if name in metadata} | fields
    identity, choices = id_field(fields, position), _choices(fields)
    if "title" in fields and not {*QUESTION_FIELDS, *ANSWER_FIELDS} - {"text"} & fields.keys():
        raise ValueError("text: stands beside a title and no answer: a passage, not a question")
    return Question(
        id=identity,
        text=text_field(fields, *QUESTION_FIELDS),
        answers=_answers(fields, choices, unanswered, unanswerable),
        kind=next((str(fields[name]) for name in KIND_FIELDS if fields.get(name)), ""),
        gold=tuple(dict.fromkeys(_gold(fields))),
        hops=_hops(fields, identity),
        choices=choices,
        gold_ids=tuple(dict.fromkeys(_gold_ids(fields))),
    )


def _answers(
    fields: dict[str, Any], choices: tuple[str, ...], unanswered: bool, unanswerable: Unanswerable
) -> tuple[str, ...]:
    if _unanswerable(fields):
        if unanswered or unanswerable == "empty":
            return () if unanswered else UNANSWERABLE
        raise ExcludedRecord("its publisher marks it as unanswerable")
    found: dict[str, None] = {}
    for name in (*ANSWER_FIELDS, "output"):
        for answer in _listed(fields, name):
            if choices and type(answer) is int and 0 <= answer < len(choices):
                answer = string.ascii_uppercase[answer]  # FlashRAG's golden_answers are places in the choices
            if answer is None:
                continue
            text = answer_text(name, answer)
            if text.strip():
                found.setdefault(_letter(name, text.strip(), choices) if choices else text.strip())
    if not found and not unanswered:
        raise ValueError(
            f"no gold answer in any of the fields {', '.join(ANSWER_FIELDS)}; found the fields {', '.join(list(fields)[:8])}"
        )
    return tuple(found)


def answer_text(name: str, answer: Any) -> str:
    """An answer as text: a number as it is written, true and false as yes and no. ValueError for anything else."""
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
    """MuSiQue-Full's, SQuAD 2's official and the datasets library's mark of a question whose passages do not answer it.

    In a table they are words.
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
    """The letter of the choice that an answer names, by its letter or its text."""
    letters = string.ascii_uppercase[: len(choices)]
    if len(answer) == 1 and answer.upper() in letters:
        return answer.upper()
    same = [
        letter for letter, choice in zip(letters, choices, strict=True) if choice.strip() == answer.strip()
    ]
    if not same:
        raise ValueError(
            f"{name}: got {answer!r}, neither a letter from A to {letters[-1]} nor one of the choices"
        )
    return same[0]


_ANSWER_DICTS = (("Value", "Aliases"), ("value", "aliases"), ("", "text"), ("text", ""), ("answer", ""))
"""Names of an answer and of a list of answers inside an object: TriviaQA's own form and that of the datasets library, SQuAD's
there, SQuAD's own, KILT's."""


def _listed(fields: dict[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if name == "output":
        # KILT's; in a file of predictions it is what a model wrote.
        entries = value if isinstance(value, list) else []
        return [entry["answer"] for entry in entries if isinstance(entry, dict) and "answer" in entry]
    if isinstance(value, dict):
        return _inside(name, value)
    if isinstance(value, str) and name in LISTED_AS_TEXT:
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
            for inner in (_inside(name, entry) if isinstance(entry, dict) else [entry])
        ]
    return [] if value is None else [value]


def _inside(name: str, value: dict[str, Any]) -> list[Any]:
    """The answers of an object; ValueError for one of no known form, since its answers would be lost."""
    for one, more in _ANSWER_DICTS:
        if more in value and isinstance(value[more], list):
            return [*([value[one]] if one in value else []), *value[more]]
        if one in value and not isinstance(value[one], list | dict):
            return [value[one]]
    raise ValueError(f"{name}: got an object with the fields {', '.join(list(value)[:8])}, not an answer")


def _choices(fields: dict[str, Any]) -> tuple[str, ...]:
    names = [f"choice_{letter}" for letter in string.ascii_uppercase if f"choice_{letter}" in fields]
    found = [fields[name] for name in names] or list_field(fields, "choices")
    if not all(isinstance(choice, str) for choice in found) or len(found) > len(string.ascii_uppercase):
        raise ValueError("choices: not a list of at most 26 strings")
    return tuple(found)


def _gold(fields: dict[str, Any]) -> Iterator[str]:
    """Titles: our own form, HotpotQA's [title, sentence] pairs or plain titles, MuSiQue's supporting paragraphs, MultiHop-RAG's
    evidence, those of `GOLD_PASSAGES`."""
    facts = fields.get("supporting_facts")
    if isinstance(facts, dict):
        fields = fields | {"supporting_facts": list_field(facts, "title")}  # the form of the datasets library
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
    """Ids: of a list of them, of the passages in `GOLD_PASSAGES`, of supporting paragraphs with ids, of KILT's provenance."""
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
        if any(passage.get(name) not in (None, "") for name in PASSAGE_IDS):
            yield id_field(passage, 0, PASSAGE_IDS)
    for source in _provenance(fields):
        if source.get("wikipedia_id") is not None:
            yield str(source["wikipedia_id"])


def _gold_passages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The gold passages of the first list of `GOLD_PASSAGES` that has any."""
    for name in GOLD_PASSAGES:
        value = fields.get(name)
        if found := [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []:
            return found
    return []


def _provenance(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Where KILT's answers are from."""
    for output in list_field(fields, "output") if "input" in fields else ():
        for source in list_field(output, "provenance") if isinstance(output, dict) else ():
            if isinstance(source, dict):
                yield source


def _hops(fields: dict[str, Any], identity: str) -> int:
    """Our own field, the length of MuSiQue's decomposition, or the number in its ids ("3hop1__...")."""
    stated = fields.get("hops")
    if isinstance(stated, int) and not isinstance(stated, bool) and stated >= 0:
        return stated
    if stated is not None:
        raise ValueError(f"hops: got {stated!r}, not a whole number")
    if steps := list_field(fields, "question_decomposition"):
        return len(steps)
    named = re.match(r"(\d)hop\d?__", identity)
    return int(named[1]) if named else 0
