"""The short answer in a long one: what EM and F1 are taken of where a model answers in sentences, or chooses a letter."""

import ast
import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

FINAL_ANSWER = "The final answer:"
"""Opens the answer in R3-RAG's step format (Figures 6 and 7)."""

EXTRACT_TEMPLATE = (
    "Below are a question and an answer to it in full sentences. List the short forms of the answer: a name, a date, a number, "
    "a place, yes or no. All of them must mean the same and answer the question; of dates, numbers and names give the usual "
    'ways of writing. Reply with one JSON list of strings and nothing else, such as ["July 4, 1776", "4 July 1776"].\n\n'
    "Question: {question}\nAnswer: {answer}\nShort answers:"
)
"""Asks a model for the short answers, as R3-RAG does before EM and F1 (section 4.1; the paper prints no prompt)."""

_LETTERS = (
    re.compile(r"(?i:answer)\W*(?i:is\b)?[\s*:]*(?:\$?\\boxed\{)?\(?([A-Z])\b|\\boxed\{\(?([A-Z])\b"),
    re.compile(r"(?i:choice|option)\s*(?i:is\b)?[\s*:]*\(?([A-Z])\b"),
    re.compile(r"^\W*([A-Z])(?:[).:,*]|\s*$)", re.MULTILINE),
)
"""A letter that is the answer, a choice, or opens a line."""


def final_answer(text: str) -> str:
    """What stands after the last "The final answer:", up to the next section or blank line; the whole text without one."""
    _, marker, rest = text.rpartition(FINAL_ANSWER)
    if not marker:
        return text.strip()
    return re.split(r"\n\s*\n|\n(?:Step \d+|The \w+ \w+):", rest.lstrip(), maxsplit=1)[0].strip()


def listed_answers(reply: str) -> list[str] | None:
    """The short answers of a reply to `EXTRACT_TEMPLATE`: its first list, in JSON's or Python's form.

    None where there is no such list, or it holds anything but texts and numbers.
    """
    for match in re.finditer(r"(?<!\[)\[", reply):
        found = _list_at(reply[match.start() :])
        if found is None:
            continue  # "Short answers [all equal]: [...]"
        if not all(isinstance(item, str | int | float) for item in found):
            return None
        return [str(item).strip() for item in found if str(item).strip()]
    return None


def _list_at(text: str) -> list[Any] | None:
    """The list that a text opens with; None where it opens with none that can be read."""
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        pass
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(text[: text.index("]") + 1])
    return None


def chosen_letter(text: str, choices: int) -> str:
    """The letter that a reply to a multiple-choice question settles on, of the first `choices`; "" where it is none.

    A letter that is named as the answer ("the answer is (B)") goes before one that is named as a choice, and that before one
    that opens a line; of several the last counts. The text of a choice is not looked for: a reply that names no letter is
    wrong (LongBench-v2).
    """
    allowed = {chr(ord("A") + at) for at in range(choices)}
    for form in _LETTERS:
        found = [letter for match in form.finditer(text) for letter in match.groups() if letter in allowed]
        if found:
            return found[-1]
    return ""


def choice_correct(prediction: str, answers: Sequence[str], choices: Sequence[str]) -> float:
    """1.0 if the prediction settles on the letter of a gold answer, else 0.0; gold answers are letters or texts of choices."""
    letter = chosen_letter(prediction, len(choices))
    gold = {answer if len(answer) == 1 else _letter_of(answer, choices) for answer in answers}
    return float(bool(letter) and letter in gold)


def _letter_of(answer: str, choices: Sequence[str]) -> str:
    return chr(ord("A") + list(choices).index(answer)) if answer in choices else ""
