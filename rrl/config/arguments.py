"""Strict, typed string arguments of config files: `configs/x.py:size=3b,steps=2,data=FOLDER`.

A config file declares its arguments with their defaults, and the defaults fix the types:

    def get_config(arg: str = ""):
        arg = parse(arg, size=("tiny", "3b", "7b"), steps=80, lr=1e-4, data="", quick=False)

A tuple lists the allowed values, the first of which is the default; a type alone (`steps=int`) means None unless given. The
manner is big_vision's; what is stricter here is that every wrong argument is a `UserError` which names the argument, the value,
and what is allowed.
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
    """Parses `key=value,key=value` by the types of the defaults.

    A key alone (`quick`) means true, for arguments that are true or false. A value may contain "=" (the first one separates) but
    no comma. An argument may be given once.

    Args:
        arg: what stands behind the colon of `--config=configs/x.py:...`; empty or None for none.
        **defaults: bool, int, float or str, or one of these types; or a tuple of allowed values, the first of which is
            the default.

    Returns:
        A namespace with one attribute for each default.

    Raises:
        UserError: an argument that is not declared, given twice, or whose value does not fit its type or choices.
        TypeError: a default of another type (a mistake in the config file, not in its use).
    """
    values = {key: _first(key, default) for key, default in defaults.items()}
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
    """The name of a run's folder by its config's name and arguments.

    Of a name that is too long for a file system the end gives way to the name's SHA-256, so that each argument still has a
    folder of its own.
    """
    name = "-".join([stem, *re.findall(r"[\w.=]+", arg)])
    if len(name.encode()) <= MAX_NAME_BYTES:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name.encode()[: MAX_NAME_BYTES - 13].decode(errors='ignore')}-{digest}"


def _first(key: str, default: Any) -> Any:
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
    first = {k: _first(k, d) for k, d in defaults.items()}
    known = ", ".join(f"{k}={'' if v is None else v}" for k, v in first.items()) or "none"
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
