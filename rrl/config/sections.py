"""Config sections and their frozen dataclasses: add defaults (`fill_sections`, `fill_defaults`), check and build (`build`)."""

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ml_collections import ConfigDict, FieldReference

from rrl.config.renamed import rename_fields
from rrl.errors import UserError

Section = TypeVar("Section")

DERIVED = ("total_steps", "vocab_size", "eos_token_id", "pad_token_id")
"""Fields that a run computes from its steps and its tokenizer, so that no config lists them."""


def fill_sections(config: ConfigDict, kinds: Mapping[str, type]) -> None:
    """Apply `fill_defaults` to sections of a config, in place. A section that the config lacks is added.

    Args:
        config: the config.
        kinds: name of each section -> its dataclass.
    """
    for name, kind in kinds.items():
        if name not in config:
            config[name] = ConfigDict()
        fill_defaults(config[name], kind)


def fill_defaults(section: ConfigDict, kind: type) -> None:
    """Add to a config section, in place, the fields of its dataclass that the section does not list, with their defaults.

    The command line can only override fields that a locked config contains. Fields without a default are not added, nor are
    fields that hold a dataclass, which are separate sections. A field that may be None accepts a value of any type on the
    command line, so that `None` is possible; `build` checks the type.
    """
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        hint = hints[field.name]
        if isinstance(hint, types.UnionType):
            hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
            if field.name in section:
                default = section[field.name]
                del section[field.name]
            if default is not dataclasses.MISSING:
                default = FieldReference(default, field_type=object)
        is_section = dataclasses.is_dataclass(hint) or dataclasses.is_dataclass(default)
        if field.name not in (*section, *DERIVED) and default is not dataclasses.MISSING and not is_section:
            section[field.name] = default


def build(kind: type[Section], values: Mapping[str, Any], where: str, **more: Any) -> Section:
    """Build a frozen dataclass from the values of a config section.

    Args:
        kind: the dataclass.
        values: the section's fields. Old names of renamed fields are accepted.
        where: dotted name of the section, for error messages.
        **more: fields that the run sets and the section must not list.

    Raises:
        UserError: a field is unknown, missing or refused by the dataclass. The message names the section and the field.
    """
    known = [field.name for field in dataclasses.fields(kind) if field.name not in more]  # type: ignore[arg-type]
    values = dict(values)
    rename_fields(where, values)
    refuse_unknown_fields(known, values, where)
    plain = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    hints = typing.get_type_hints(kind)
    for name, value in plain.items():
        kinds = typing.get_args(hints[name]) if isinstance(hints[name], types.UnionType) else ()
        if kinds and not _is_a(value, kinds):
            allowed = " or ".join("None" if k is types.NoneType else k.__name__ for k in kinds)
            raise UserError(f"{where}.{name}={value!r} must be {allowed}")
        item_type = typing.get_args(hints[name])[0] if typing.get_origin(hints[name]) is tuple else None
        if item_type in (int, float, str) and not (
            isinstance(value, tuple) and all(_is_a(v, (item_type,)) for v in value)
        ):
            raise UserError(
                f"{where}.{name}={value!r} must be a tuple, each item of which is {item_type.__name__}"
            )
    try:
        return kind(**plain, **more)
    except UserError as error:
        if str(error).startswith(f"{where}."):
            raise
        # The dataclass's error begins with its own section name, such as "optim.lr=..."; here it may be critic_optim.
        usual_section, _, rest = str(error).partition(".")
        text = rest if where.endswith(f"_{usual_section}") else str(error)
        raise UserError(f"{where}.{text}") from error
    except TypeError as error:
        raise UserError(f"{where}: {error}") from error


def _is_a(value: object, kinds: tuple[type, ...]) -> bool:
    """Return whether a value has one of these types. An int counts as a float; a bool does not count as a number."""
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


def refuse_unknown_fields(known: Iterable[str], values: Iterable[str], where: str) -> None:
    """Raise UserError for the first name in `values` that is not a known field of the section `where`."""
    for name in values:
        if name not in known:
            raise UserError(
                f"{where}.{name} is unknown; the fields of {where} are {', '.join(sorted(known))}"
            )
