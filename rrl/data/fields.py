"""Read the fields of one record, with errors that name the field. A `ValueError` means that the record is broken."""

import ast
import io
import itertools
import json
import re
import tokenize
from collections.abc import Sequence
from typing import Any

from rrl.data.field_names import QUESTION_ID_FIELDS


def fields_of(record: Any) -> dict[str, Any]:
    """Return the record as a mapping. Raises ValueError if it is not one."""
    if not isinstance(record, dict):
        raise ValueError(f"got {_short(record)}, not an object with named fields")
    return record


def question_fields_of(record: Any) -> dict[str, Any]:
    """Return the fields of a record, with a nested question merged into the top level.

    In results.jsonl and trajectories.jsonl the field `question` is an object. Its fields replace those of the record, and the
    record's own `answer`, which the model gave, becomes `prediction`. Other records are unchanged. Raises ValueError as
    `fields_of`.
    """
    record = fields_of(record)
    question = record.get("question")
    if isinstance(question, dict) and isinstance(question.get("text"), str):
        others = {name: value for name, value in record.items() if name != "answer"}
        prediction = {"prediction": record["answer"]} if "answer" in record else {}
        return {**prediction, **others, **question, "question": question["text"]}
    return record


def text_field(record: dict[str, Any], *names: str) -> str:
    """Return the first of the named fields that the record has, stripped. Raises ValueError unless it is a non-empty string."""
    for name in names:
        if name in record:
            value = record[name]
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name}: got {_short(value)}, not a non-empty string")
            return value.strip()
    present = ", ".join(list(map(str, record))[:8]) + (", ..." if len(record) > 8 else "")
    raise ValueError(f"{' or '.join(names)}: missing; found the fields {present or '(none)'}")


def list_field(record: dict[str, Any], name: str) -> list[Any]:
    """Return a list in a field, or [] if the field is missing or null.

    Tables hold lists as text (see `list_in_text`). Raises ValueError if the value is not a list.
    """
    value = record.get(name)
    if isinstance(value, str):
        try:
            value = list_in_text(value) if value.strip() else None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        # A text that is neither blank nor a list stays a string, for the error below.
        value = record[name] if value is None and record[name].strip() else value
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{name}: got {_short(value)}, not a list")
    return value or []


def list_in_text(text: str) -> list[Any] | None:
    """Return the list that a text holds in JSON or Python syntax; None if the text is not in brackets.

    Raises ValueError if it cannot be parsed, such as the text of a NumPy array, which has no commas between its strings.
    """
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return None
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        parsed = ast.literal_eval(text)
        # The regular expression is a fast test. Only a text that it matches is tokenised for the exact one.
        separated = not re.search(r"""["']\s+[A-Za-z]{0,2}["']""", text) or _no_adjacent_strings(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError):
        parsed = separated = None
    if not isinstance(parsed, list) or not separated:
        raise ValueError(f"got {_short(text)}, not a list in JSON or Python")
    return parsed


def _no_adjacent_strings(text: str) -> bool:
    """Return whether every two strings of a Python literal have a comma between them; Python joins adjacent strings."""
    kinds = [token.type for token in tokenize.generate_tokens(io.StringIO(text).readline)]
    kinds = [kind for kind in kinds if kind not in (tokenize.NL, tokenize.NEWLINE)]
    return not any(a == b == tokenize.STRING for a, b in itertools.pairwise(kinds))


def id_field(record: dict[str, Any], position: int, names: Sequence[str] = QUESTION_ID_FIELDS) -> str:
    """Return the first of the named fields with a value, as a string, or the position in the file if none has a value."""
    value = next((record[name] for name in names if record.get(name) is not None), position)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"id: got {_short(value)}, not a string or an integer")
    return str(value)


def _short(value: Any) -> str:
    """Return at most 60 characters of a value's representation, for error messages."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
