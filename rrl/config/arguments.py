"""Strict, typed string arguments of config files: `configs/x.py:size=3b,steps=2,data=FOLDER`.

A config file declares its arguments with their defaults, and the defaults fix the types:

    def get_config(arg: str = ""):
        args = parse(arg, size=("tiny", "3b", "7b"), steps=80, lr=1e-4, data="", quick=False)

A tuple lists the allowed values; the first is the default. A type alone (`steps=int`) makes the default None. The syntax
is that of big_vision's config arguments. Every wrong argument raises a `UserError` that names the argument, the value and what
is allowed.
"""

import difflib
import hashlib
import re
import types
from typing import Any

from rrl.errors import UserError
from rrl.files import MAX_NAME_BYTES

_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def parse(arg: str | None, **defaults: Any) -> types.SimpleNamespace:
    """Parse `key=value,key=value` by the types of the defaults.

    A key alone (`quick`) sets a boolean argument to true. The first "=" separates key and value; the value may contain further
    ones, but no comma. Each argument may be given once.

    Args:
        arg: the text after the colon of `--config=configs/x.py:...`; empty or None if there is none.
        **defaults: a bool, int, float or str, or one of these types, or a tuple of allowed values with the default first.

    Returns:
        A namespace with one attribute for each default.

    Raises:
        UserError: an argument is not declared, is given twice, or has a value that does not fit its type or choices.
        TypeError: a default has another type (a mistake in the config file, not by its user).
    """
    values = {key: _default_value(key, default) for key, default in defaults.items()}
    seen: set[str] = set()
    for part in filter(None, (p.strip() for p in (arg or "").split(","))):
        key, equals, text = part.partition("=")
        if key not in defaults:
            raise UserError(_unknown(key, defaults))
        if key in seen:
            raise UserError(f"config argument {key!r} is given twice in {arg!r}; give it once.")
        seen.add(key)
        default = defaults[key]
        if not equals:
            if _kind(default) is not bool:
                raise UserError(
                    f"config argument {key!r} has no value; write {key}=VALUE ({_allowed(default)})."
                )
            values[key] = True
        else:
            values[key] = _convert(key, text, default)
    return types.SimpleNamespace(**values)


def run_name(stem: str, arg: str) -> str:
    """Return the name of a run's folder, made of the config's name and its arguments.

    Only letters, digits, "_", "." and "=" of the arguments are part of the name; "-" replaces what stands between them. So
    `data=a/b` and `data=a-b` have the same name. If the name is too long for a file system, its end is replaced by 12
    hexadecimal digits of the SHA-256 of the whole name.
    """
    name = "-".join([stem, *re.findall(r"[\w.=]+", arg)])
    if len(name.encode()) <= MAX_NAME_BYTES:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name.encode()[: MAX_NAME_BYTES - 13].decode(errors='ignore')}-{digest}"


def _default_value(key: str, default: Any) -> Any:
    """Return the value of an argument that is not given. Raises TypeError if the declaration is wrong."""
    if default in _KINDS:
        return None
    value = default[0] if isinstance(default, tuple) else default
    if type(value) not in _KINDS:
        raise TypeError(
            f"default of argument {key!r} must be bool, int, float, str or a tuple of them, not {default!r}"
        )
    return value


def _unknown(key: str, defaults: dict[str, Any]) -> str:
    near = difflib.get_close_matches(key, defaults, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    values = {k: _default_value(k, d) for k, d in defaults.items()}
    known = ", ".join(f"{k}={'' if v is None else v}" for k, v in values.items()) or "none"
    return f"unknown config argument {key!r}.{hint} Known arguments, with their defaults: {known}."


def _allowed(default: Any) -> str:
    if isinstance(default, tuple):
        return "one of " + ", ".join(map(str, default))
    return _KINDS[_kind(default)]


def _kind(default: Any) -> type:
    return default if isinstance(default, type) else type(default)


def _convert(key: str, text: str, default: Any) -> Any:
    if isinstance(default, tuple):
        for choice in default:
            if str(choice) == text:
                return choice
    else:
        try:
            return _parse_as(_kind(default), text)
        except ValueError:
            pass
    raise UserError(f"config argument {key}={text!r} is not allowed; {key!r} must be {_allowed(default)}.")


def _parse_as(kind: type, text: str) -> Any:
    if kind is bool:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ValueError(text)
    return kind(text)
