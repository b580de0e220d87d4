"""`UserError`, the one exception for wrong input, and checks of settings that raise it.

Launchers print the message of a `UserError` and exit with code 2.
"""

import numbers
from collections.abc import Iterable


class UserError(ValueError):
    """Wrong input by the user.

    The message names what is wrong (field, file, line), the value, what is allowed, and how to fix it.
    """


def describe_error(error: BaseException) -> str:
    """Return `repr(error)`. If that fails, as the `repr` of a user's own class may, return the name of the error's type."""
    try:
        return repr(error)
    except Exception:
        return type(error).__name__


def require_number(settings: object, *fields: str, where: str = "") -> None:
    """Raise UserError if one of these fields of `settings` is not a number.

    Args:
        settings: object whose attributes are checked.
        *fields: names of the attributes; the message names the first that is wrong.
        where: prefix of the field's name in the message, such as "train.".
    """
    for field in fields:
        value = getattr(settings, field)
        if not isinstance(value, numbers.Real):
            raise UserError(f"{where}{field}={value!r} must be a number")


def at_least(least: float, settings: object, *fields: str, where: str = "") -> None:
    """Raise UserError if one of these fields is not a number or is below `least`. See `require_number` for the arguments."""
    require_number(settings, *fields, where=where)
    for field in fields:
        value = getattr(settings, field)
        if not value >= least:  # also refuses nan
            raise UserError(f"{where}{field}={value} must be at least {least}")


def at_most(most: float, settings: object, *fields: str, where: str = "") -> None:
    """Raise UserError if one of these fields is not a number or is above `most`. See `require_number` for the arguments."""
    require_number(settings, *fields, where=where)
    for field in fields:
        value = getattr(settings, field)
        if not value <= most:
            raise UserError(f"{where}{field}={value} must be at most {most}")


def integer_at_least(least: float, settings: object, *fields: str, where: str = "") -> None:
    """Raise UserError if one of these fields is not an integer or is below `least`. See `require_number` for the arguments."""
    for field in fields:
        value = getattr(settings, field)
        if not isinstance(value, numbers.Integral):
            raise UserError(f"{where}{field}={value!r} must be a whole number")
    at_least(least, settings, *fields, where=where)


def one_of(allowed: Iterable[str], settings: object, *fields: str, where: str = "") -> None:
    """Raise UserError if the value of one of these fields is not in `allowed`. See `require_number` for the other arguments."""
    for field in fields:
        value = getattr(settings, field)
        if value not in allowed:
            raise UserError(f"{where}{field}={value!r} is unknown; choose one of {', '.join(allowed)}")
