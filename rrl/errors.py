"""The one exception for wrong input: launchers print it and exit with code 2. And its most frequent reasons."""

import numbers
from collections.abc import Iterable


class UserError(ValueError):
    """Wrong input by the user.

    The message names what is wrong (field, file, line), the value found, what is allowed, and how to fix it.
    """


def describe_error(error: BaseException) -> str:
    """It in words, where others wait for some: not every error can be written."""
    try:
        return repr(error)
    except Exception:
        return type(error).__name__


def require_number(settings: object, *fields: str, where: str = "") -> None:
    """Raises UserError for the first of these fields of `settings` that is no number; `where` stands before its name."""
    for field in fields:
        value = getattr(settings, field)
        if not isinstance(value, numbers.Real):
            raise UserError(f"{where}{field}={value!r} must be a number")


def at_least(least: float, settings: object, *fields: str, where: str = "") -> None:
    """Raises UserError for the first of these fields of `settings` that is smaller; before that as `require_number`."""
    require_number(settings, *fields, where=where)
    for field in fields:
        value = getattr(settings, field)
        if not value >= least:  # nan is not
            raise UserError(f"{where}{field}={value} must be at least {least}")


def at_most(most: float, settings: object, *fields: str, where: str = "") -> None:
    """Raises UserError for the first of these fields of `settings` that is larger; before that as `require_number`."""
    require_number(settings, *fields, where=where)
    for field in fields:
        value = getattr(settings, field)
        if not value <= most:
            raise UserError(f"{where}{field}={value} must be at most {most}")


def integer_at_least(least: float, settings: object, *fields: str, where: str = "") -> None:
    """Raises UserError for the first of these fields of `settings` that is no whole number; then as `at_least`."""
    for field in fields:
        value = getattr(settings, field)
        if not isinstance(value, numbers.Integral):
            raise UserError(f"{where}{field}={value!r} must be a whole number")
    at_least(least, settings, *fields, where=where)


def one_of(allowed: Iterable[str], settings: object, *fields: str, where: str = "") -> None:
    """Raises UserError for the first of these fields of `settings` that is none of `allowed`."""
    for field in fields:
        value = getattr(settings, field)
        if value not in allowed:
            raise UserError(f"{where}{field}={value!r} is unknown; choose one of {', '.join(allowed)}")
