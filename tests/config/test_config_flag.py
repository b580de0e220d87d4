"""Tests of config flags: a config file with its arguments."""

from rrl.config.config_flag import split_config, with_arguments


def test_with_arguments_appends_to_a_config_flag():
    assert with_arguments("a.py", "x=1", "") == "a.py:x=1"
    assert with_arguments("a.py:y=2", "x=1") == "a.py:y=2,x=1"


def test_with_arguments_replaces_arguments_of_the_same_name():
    assert with_arguments("a.py:steps=2,quick", "steps=0", "quick") == "a.py:steps=0,quick"


def test_a_config_flag_is_split_into_its_file_and_arguments_by_name():
    assert split_config("a.py:steps=2, quick") == ("a.py", {"steps": "steps=2", "quick": " quick"})
    assert split_config("a.py") == ("a.py", {})
