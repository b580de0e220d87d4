"""Explain why absl or ml_collections refused the flags. Read `describe_flag_error` first."""

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from rrl.errors import UserError


def describe_flag_error(error: Exception, argv: Sequence[str], values: flags.FlagValues) -> str:
    """Return a message that names the wrong override of the config; the error's own message if no override is wrong.

    Args:
        error: raised while `values` parsed `argv`.
        argv: the command line, with the program's name first.
        values: the flags.
    """
    reason = ""
    if isinstance(error, AttributeError | KeyError):
        reason = _unknown_field(argv, values)
    elif isinstance(error, flags.IllegalFlagValueError):
        reason = _wrong_value(argv, values)
    return reason or str(error)


def innermost_user_error(error: BaseException) -> BaseException:
    """Return the innermost UserError behind an error; the error itself if there is none.

    ml_collections wraps errors of config files together with their tracebacks.
    """
    innermost, inner = error, error.__cause__ or error.__context__
    while inner is not None:
        innermost = inner if isinstance(inner, UserError) else innermost
        inner = inner.__cause__ or inner.__context__
    return innermost


def _overrides(argv: Sequence[str], values: flags.FlagValues) -> tuple[Any, dict[str, str]]:
    """Return the config without overrides, and name -> text of each `--config.a.b=VALUE`.

    The config is None if `argv` has no override or no `--config`.
    """
    matches = [re.match(r"--?(?:no)?(config\.[^=]+)(?:=(.*))?", arg, re.DOTALL) for arg in argv]
    overrides = {match[1]: match[2] or "" for match in matches if match}
    flag = next((index for index, arg in enumerate(argv) if re.match(r"--?config(=|$)", arg)), None)
    if not overrides or flag is None:
        return None, {}
    return values["config"].parser.parse(argv[flag].partition("=")[2] or argv[flag + 1]), overrides


def _unknown_field(argv: Sequence[str], values: flags.FlagValues) -> str:
    """Return an error message for the first override of a field that the config does not have; "" if there is none."""
    config, overrides = _overrides(argv, values)
    for name in overrides:
        section, path = config, "config"
        for field in name.split(".")[1:]:
            fields = sorted(section) if hasattr(section, "keys") else []
            if field not in fields:
                return (
                    f"--{name}: {path} has no field {field!r}; its fields are {', '.join(fields) or 'none'}"
                )
            section, path = section[field], f"{path}.{field}"
    return ""


def _wrong_value(argv: Sequence[str], values: flags.FlagValues) -> str:
    """Return an error message for the first override whose value does not have its field's type; "" if there is none."""
    config, overrides = _overrides(argv, values)
    for name, value in overrides.items():
        section = config
        *path, field = name.split(".")[1:]
        for part in path:
            section = section[part]
        kind = section.get_type(field)
        if kind in _PARSERS and not _PARSERS[kind][0](value):
            return f"--{name}={value!r} must be {_PARSERS[kind][1]}; the config has {section[field]!r}"
    return ""


def _parses_as(kind: Callable[[str], Any]) -> Callable[[str], bool]:
    """Return a function that tells whether `kind` can parse a text."""

    def parses(text: str) -> bool:
        try:
            kind(text)
        except (ValueError, SyntaxError):
            return False
        return True

    return parses


_PARSERS: dict[type, tuple[Callable[[str], bool], str]] = {
    bool: (lambda text: text.lower() in ("true", "t", "1", "false", "f", "0"), "true or false"),
    int: (_parses_as(int), "a whole number"),
    float: (_parses_as(float), "a number"),
    tuple: (_parses_as(ast.literal_eval), "a tuple in Python's syntax, with strings in quotes"),
}
"""Field type -> (whether a text is a value of the type, description of the allowed values)."""
