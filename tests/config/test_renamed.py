"""Old names of renamed config fields are accepted in configs, overrides and stored configs."""

import dataclasses
import json

import pytest
from ml_collections import ConfigDict

from rrl.config import renamed
from rrl.config.sections import build
from rrl.rewards.endpoint_config import EndpointConfig
from rrl.rl.critic import CriticConfig
from rrl.rl.objective import ObjectiveConfig
from rrl.rollout.config import EngineConfig
from rrl.runs.launcher import load_config
from rrl.runs.workdir import CONFIG, read_config

TABLE = renamed.RENAMED


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A section with a renamed field."""

    wake_threshold: int = 16


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setattr(renamed, "RENAMED", {"rollout": {"feeds": "wake_threshold"}})


def test_a_section_with_an_old_field_name_is_built_with_a_warning_that_gives_the_new_name(caplog):
    assert build(Sizes, {"feeds": 4, "wake_threshold": 16}, "judge_rollout") == Sizes(4)
    assert "config.judge_rollout.feeds is now config.judge_rollout.wake_threshold" in caplog.text


def test_fields_of_the_same_name_in_other_sections_are_not_renamed(caplog):
    config = ConfigDict({"feeds": 1, "rollout": {"feeds": 2, "rows": 3}, "data": {"feeds": 4}})
    renamed.rename_config(config)
    assert config.to_dict() == {"feeds": 1, "rollout": {"wake_threshold": 2, "rows": 3}, "data": {"feeds": 4}}
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("--config.rollout.feeds=4", "--config.rollout.wake_threshold=4"),
        ("--config.reader_rollout.feeds", "--config.reader_rollout.wake_threshold"),
        ("--config.rollout.rows=4", "--config.rollout.rows=4"),
        ("--config.data.feeds=4", "--config.data.feeds=4"),
        ("--config=configs/feeds.py:feeds=4", "--config=configs/feeds.py:feeds=4"),
        ("--config.rollout.note=rollout.feeds=4", "--config.rollout.note=rollout.feeds=4"),
    ],
)
def test_command_line_overrides_get_the_new_name(given, right):
    assert renamed.rename_overrides([given]) == [right]


def test_the_config_of_an_older_workdir_is_read_under_the_new_names(tmp_path, caplog):
    (tmp_path / CONFIG).write_text(json.dumps({"run": {"rollout": {"feeds": 4}}, "feeds": 1}))
    assert read_config(tmp_path) == {"run": {"rollout": {"wake_threshold": 4}}, "feeds": 1}
    assert not caplog.records


SECTION_KINDS = {
    "rollout": EngineConfig,
    "critic": CriticConfig,
    "objective": ObjectiveConfig,
    "endpoint": EndpointConfig,
}


def test_every_new_name_is_a_field_and_no_old_name_is():
    assert set(TABLE) == set(SECTION_KINDS)
    for section, names in TABLE.items():
        fields = {field.name for field in dataclasses.fields(SECTION_KINDS[section])}
        assert fields >= set(names.values()) and not fields & set(names)


def test_a_command_with_old_names_sets_the_new_fields(monkeypatch, caplog):
    monkeypatch.setattr(renamed, "RENAMED", TABLE)
    config = load_config("configs/rsearch_grpo.py:steps=1", ["rollout.feeds=4", "objective.streams=1"])
    assert (config.rollout.wake_threshold, config.objective.parallel_microbatches) == (4, 1)
    assert "feeds" not in config.rollout and "config.rollout.feeds is now" in caplog.text
