"""Read the gold answers of a question from the fields of its record. Read `gold_answers` first."""

import math
import string
from typing import Any, Literal

from rrl.data.field_names import ANSWER_FIELDS
from rrl.data.fields import list_field, list_in_text
from rrl.data.records import ExcludedRecord

LIST_AS_TEXT_FIELDS = ("answers", "golden_answers", "answer_aliases", "possible_answers", "reference")
"""Fields of `ANSWER_FIELDS` whose value may be a list written as text, such as a table cell '["a", "b"]'."""
OnUnanswerable = Literal["leave_out", "empty"]
"""How to treat questions that their publisher marks as unanswerable; see `load_questions`."""
EMPTY_ANSWER = ("",)
"""Gold answers of an unanswerable question that is loaded with "empty": the empty answer is correct."""


def gold_answers(
    fields: dict[str, Any], choices: tuple[str, ...], answers_optional: bool, unanswerable: OnUnanswerable
) -> tuple[str, ...]:
    """Return the gold answers of a question, as letters if it has choices.

    `answers_optional` and `unanswerable` are as in `rrl.data.questions.load_questions`.
    """
    if _is_unanswerable(fields):
        if answers_optional:
            return ()
        if unanswerable == "empty":
            return EMPTY_ANSWER
        raise ExcludedRecord("its publisher marks it as unanswerable")
    answers: dict[str, None] = {}
    for name in (*ANSWER_FIELDS, "output"):
        for answer in _answer_values(fields, name):
            if choices and type(answer) is int and 0 <= answer < len(choices):
                answer = string.ascii_uppercase[answer]  # FlashRAG's golden_answers are indices of choices
            if answer is None:
                continue
            text = answer_text(name, answer)
            if text.strip():
                answers.setdefault(_letter(name, text.strip(), choices) if choices else text.strip())
    if not answers and not answers_optional:
        raise ValueError(
            f"no gold answer in any of the fields {', '.join(ANSWER_FIELDS)}; found the fields {', '.join(list(fields)[:8])}"
        )
    return tuple(answers)


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


def _is_unanswerable(fields: dict[str, Any]) -> bool:
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


_ANSWER_KEYS = (
    ("Value", "Aliases"),  # TriviaQA's file
    ("value", "aliases"),  # TriviaQA in the datasets library
    ("", "text"),  # SQuAD in the datasets library
    ("text", ""),  # SQuAD's file
    ("answer", ""),  # KILT's file
)
"""(key of one answer, key of a list of answers) in an answer object; "" if the format has no such key."""


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


def choices_of(fields: dict[str, Any]) -> tuple[str, ...]:
    """Return the choices of a multiple-choice question, from `choice_A`, `choice_B`, ... or the list `choices`."""
    names = [f"choice_{letter}" for letter in string.ascii_uppercase if f"choice_{letter}" in fields]
    texts = [fields[name] for name in names] or list_field(fields, "choices")
    if not all(isinstance(choice, str) for choice in texts) or len(texts) > len(string.ascii_uppercase):
        raise ValueError("choices: not a list of at most 26 strings")
    return tuple(texts)
