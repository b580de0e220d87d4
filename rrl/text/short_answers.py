"""Extract short answers, for EM and F1, from answers in sentences, and letters from replies to multiple-choice questions."""

import ast
import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

FINAL_ANSWER = "The final answer:"
"""The text before the answer in R3-RAG's step format (Figures 6 and 7)."""

EXTRACT_TEMPLATE = (
    "Below are a question and an answer to it in full sentences. List the short forms of the answer: a name, a date, a number, "
    "a place, yes or no. All of them must mean the same and answer the question; of dates, numbers and names give the usual "
    'ways of writing. Reply with one JSON list of strings and nothing else, such as ["July 4, 1776", "4 July 1776"].\n\n'
    "Question: {question}\nAnswer: {answer}\nShort answers:"
)
"""Prompt that asks a model for short answers, as R3-RAG does before EM and F1 (section 4.1; the paper prints no prompt)."""

_LETTERS = (
    re.compile(r"(?i:answer)\W*(?i:is\b)?[\s*:]*(?:\$?\\boxed\{)?\(?([A-Z])\b|\\boxed\{\(?([A-Z])\b"),
    re.compile(r"(?i:choice|option)\s*(?i:is\b)?[\s*:]*\(?([A-Z])\b"),
    re.compile(r"^\W*([A-Z])(?:[).:,*]|\s*$)", re.MULTILINE),
)
"""Patterns of a chosen letter, in order of priority: named as the answer, named as a choice, at the beginning of a line."""


def final_answer(text: str) -> str:
    """Return the text after the last "The final answer:", up to the next section or blank line; without one, the whole text."""
    _, marker, rest = text.rpartition(FINAL_ANSWER)
    if not marker:
        return text.strip()
    return re.split(r"\n\s*\n|\n(?:Step \d+|The \w+ \w+):", rest.lstrip(), maxsplit=1)[0].strip()


def listed_answers(reply: str) -> list[str] | None:
    """Return the short answers of a reply to `EXTRACT_TEMPLATE`: its first list, in JSON or Python syntax.

    None if there is no such list, or if it holds anything but strings and numbers.
    """
    for match in re.finditer(r"(?<!\[)\[", reply):  # "[[" starts one list, not two
        items = _list_at(reply[match.start() :])
        if items is None:
            continue  # brackets that are not a list, as in 'Short answers [all equal]: ["4 July"]'
        if not all(isinstance(item, str | int | float) for item in items):
            return None
        return [str(item).strip() for item in items if str(item).strip()]
    return None


def _list_at(text: str) -> list[Any] | None:
    """Return the list at the beginning of a text; None if it cannot be parsed."""
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        pass
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(text[: text.index("]") + 1])
    return None


def chosen_letter(text: str, choices: int) -> str:
    """Return the letter that a reply to a multiple-choice question gives; "" if it gives none of the first `choices` letters.

    The letter is the last match of the first pattern that occurs: a letter named as the answer ("the answer is (B)"), one named
    as a choice ("option B"), one at the beginning of a line. The texts of the choices are not searched for, so a reply without a
    letter is wrong (LongBench-v2).
    """
    allowed = {chr(ord("A") + at) for at in range(choices)}
    for pattern in _LETTERS:
        letters = [
            letter for match in pattern.finditer(text) for letter in match.groups() if letter in allowed
        ]
        if letters:
            return letters[-1]
    return ""


def choice_correct(prediction: str, answers: Sequence[str], choices: Sequence[str]) -> float:
    """Return 1.0 if the chosen letter of the prediction is that of a gold answer, else 0.0.

    Gold answers are letters or texts of choices.
    """
    letter = chosen_letter(prediction, len(choices))
    gold = {answer if len(answer) == 1 else _letter_of(answer, choices) for answer in answers}
    return float(bool(letter) and letter in gold)


def _letter_of(answer: str, choices: Sequence[str]) -> str:
    return chr(ord("A") + list(choices).index(answer)) if answer in choices else ""
