"""A comparison: the commands of each arm, and the table of what they reached."""

import json

import pytest

from rrl.errors import UserError
from rrl.train.compare import cells, commands, rows, with_arguments


def finish(cell, before, after, minutes):
    cell.workdir.mkdir(parents=True)
    lines = [
        {"step": 0, "eval/em": before, "eval/f1": before, "minutes": 0.0},
        {"step": 1, "train/em": 0.5},
        {"step": 2, "eval/em": after, "eval/f1": after, "minutes": minutes},
    ]
    cell.metrics.write_text("\n".join(map(json.dumps, lines)))


def test_supervised_training_goes_on_as_long_as_grpo_took(tmp_path):
    plan = cells(tmp_path, ["GRPO", "SFT continued"], [0])
    finish(plan[0], 0.4, 0.5, 8.5)
    first, second = commands(plan[1], "configs/x.py:size=tiny", "configs/cold.py:init=P", plan)
    assert "--config=configs/cold.py:init=P,seed=1,minutes=8.50" in first
    assert second[1].startswith("--config=configs/x.py:size=tiny,steps=0,prompt=bare,policy=")


def test_the_supervised_arm_needs_grpo_before_it(tmp_path):
    plan = cells(tmp_path, ["SFT continued"], [0])
    with pytest.raises(UserError, match="'GRPO' before it"):
        commands(plan[0], "c", "s", plan)


def test_the_table_gives_mean_and_every_seed(tmp_path):
    plan = cells(tmp_path, ["GRPO", "SFT continued"], [0, 1])
    for cell, after in zip(plan, (0.5, 0.42, 0.6, 0.38), strict=True):
        finish(cell, 0.4, after, 8.0)
    text = "\n".join(rows(plan, ["GRPO", "SFT continued"]))
    assert "+15.0" in text
    assert "+10.0 +20.0" in text
    assert "+2.0 -2.0" in text


def test_an_unknown_arm_is_named(tmp_path):
    with pytest.raises(UserError, match="magic"):
        cells(tmp_path, ["magic"], [0])


def test_arguments_are_added_to_a_config_flag():
    assert with_arguments("a.py", "x=1", "") == "a.py:x=1"
    assert with_arguments("a.py:y=2", "x=1") == "a.py:y=2,x=1"
