"""Config sections get the defaults of their dataclass."""

import dataclasses

from ml_collections import ConfigDict

from rrl.config.sections import fill_defaults, fill_sections


@dataclasses.dataclass(frozen=True)
class Fields:
    required: int
    maybe_required: int | None
    maybe: int | None = 3
    plain: str = "x"


def test_fields_without_a_default_are_not_added():
    section = ConfigDict()
    fill_defaults(section, Fields)
    assert section.to_dict() == {"maybe": 3, "plain": "x"}


def test_a_field_that_may_be_none_accepts_none_and_keeps_a_given_value():
    section = ConfigDict({"maybe": 7})
    fill_defaults(section, Fields)
    assert section.maybe == 7
    section.maybe = None
    assert section.maybe is None


def test_a_section_that_the_config_lacks_is_added_with_its_defaults():
    config = ConfigDict({"first": {"plain": "y"}, "other": {"kept": 1}})
    fill_sections(config, {"first": Fields, "second": Fields})
    assert config.to_dict() == {
        "first": {"plain": "y", "maybe": 3},
        "second": {"plain": "x", "maybe": 3},
        "other": {"kept": 1},
    }
