"""Renamed config fields: the old name is accepted for one release, with a warning that gives the new name.

To rename a field, rename it in its dataclass and add a row to `RENAMED`. Configs, `--config.SECTION.FIELD=VALUE` and the
config.json of existing workdirs then accept both names.
"""

import logging
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from ml_collections import ConfigDict

log = logging.getLogger(__name__)

RENAMED: Mapping[str, Mapping[str, str]] = {
    "endpoint": {"pause": "backoff", "longest_pause": "max_backoff"},
    "critic": {"trace": "gae_lambda"},
    "objective": {"streams": "parallel_microbatches", "lengths": "row_lengths"},
    "rollout": {
        "spare_rows": "oversubscribed_slots",
        "feeds": "wake_threshold",
        "feed_tokens": "prefill_tokens",
        "patience": "max_wait_steps",
        "loops": "workers",
    },
}
"""Section -> old field -> new field. A section's name also matches with a prefix: "rollout" matches "reader_rollout" and
"judge_rollout". A nested section is written with a dot: "recipe.environment"."""

LAST_RELEASE = "0.2"
"""The last release that accepts the old names."""


def new_name(path: str) -> str:
    """Return the dotted path of a field under its new name: "rollout.feeds" -> "rollout.wake_threshold"."""
    section, _, field = path.rpartition(".")
    new = _renamed_fields(section).get(field)
    return f"{section}.{new}" if new else path


def rename_fields(section: str, values: MutableMapping[str, Any]) -> None:
    """Move the values of renamed fields to their new names, in place, and log a warning for each.

    Args:
      section: dotted path of the section, such as "rollout" or "recipe.environment".
      values: its fields. If both names are present, the old name's value is used: the user gave it, and the new name's value
        may be a default.
    """
    for old, new in _renamed_fields(section).items():
        if old in values:
            _warn(f"{section}.{old}", f"{section}.{new}")
            value = values[old]
            del values[old]
            values[new] = value


def rename_config(config: ConfigDict, section: str = "") -> None:
    """Apply `rename_fields` to a config and to all its sections, in place."""
    rename_fields(section, config)
    for name in config:
        if isinstance(config[name], ConfigDict):
            rename_config(config[name], f"{section}.{name}".lstrip("."))


def rename_overrides(argv: Sequence[str]) -> list[str]:
    """Return command-line arguments with each `--config.SECTION.FIELD` under its new name. Log a warning for each change."""
    return [_override(argument) for argument in argv]


def rename_stored(config: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return the settings of a config.json under their new names, in all sections, without a warning."""
    fields = _renamed_fields(section)
    return {
        fields.get(name, name): rename_stored(value, f"{section}.{name}".lstrip("."))
        if isinstance(value, dict)
        else value
        for name, value in config.items()
    }


def _override(argument: str) -> str:
    match = re.match(r"(--?(?:no)?config\.)([\w.]+)(?==|$)", argument)
    if match is None or new_name(match[2]) == match[2]:
        return argument
    _warn(match[2], new_name(match[2]))
    return match[1] + new_name(match[2]) + argument[match.end() :]


def _renamed_fields(section: str) -> Mapping[str, str]:
    """Return old field -> new field for the renamed fields of a section."""
    return next(
        (fields for name, fields in RENAMED.items() if re.search(rf"(^|[._]){re.escape(name)}$", section)),
        {},
    )


def _warn(old: str, new: str) -> None:
    log.warning(
        "config.%s is now config.%s; rrl %s is the last release that accepts the old name",
        old,
        new,
        LAST_RELEASE,
    )
