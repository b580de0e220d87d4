"""Reads single fields of Hugging Face's config.json; raises UserError if a value is wrong, or required and missing."""

from collections.abc import Mapping
from typing import Any

from rrl.errors import UserError


def integer(hf: Mapping[str, Any], field: str, default: int | None = None, least: int = 1) -> int:
    """A field that is an integer of at least `least`; it is required if `default` is None."""
    value = default if hf.get(field) is None else hf[field]
    if value is None:
        raise UserError(
            f"config.json: field {field!r} is missing; this is not a complete {hf.get('model_type')} config"
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"config.json: {field}={value!r} must be a whole number of at least {least}")
    return value


def positive(fields: Mapping[str, Any], field: str, default: float | None = None) -> float:
    """A field that is a finite number above 0; it is required if `default` is None."""
    value = default if fields.get(field) is None else fields[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"config.json: {field}={value!r} must be a number above 0")
    return float(value)


def token_id(hf: Mapping[str, Any], field: str) -> int | None:
    """A field that is a token id or missing."""
    value = hf.get(field)
    if isinstance(value, bool) or not isinstance(value, int | None):
        raise UserError(f"config.json: {field}={value!r} must be a token id, a whole number")
    return value


def end_ids(fields: Mapping[str, Any], file: str = "config.json") -> list[int]:
    """The end tokens in a file: none, one, or a list."""
    value = fields.get("eos_token_id")
    ends = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ends):
        raise UserError(
            f"{file}: eos_token_id={value!r} must be a token id, a whole number, or a list of token ids"
        )
    return ends
