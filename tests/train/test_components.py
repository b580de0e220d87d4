"""Tests of what a run checks about its models before it loads them."""

import dataclasses

import pytest

from configs.rsearch_grpo import get_config
from rrl.errors import UserError
from rrl.recipes.rsearch import RSearch
from rrl.setup.settings import TrainSettings
from rrl.train import components
from rrl.train.experiment import run

POLICY = "assets/miniwiki-policy"


def test_a_reader_of_the_policys_family_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(components, "load_language_model", lambda *_: pytest.fail("nothing may be loaded"))
    config = get_config(f"steps=1,reader={POLICY}")
    with pytest.raises(
        UserError, match=rf"^reader='{POLICY}' is a model of the same family .*Gemma, Llama.*reader=''"
    ):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_family_matters_only_if_the_readers_answers_are_rewarded():
    settings = TrainSettings.from_config(get_config(f"steps=1,reader={POLICY}"))
    with pytest.raises(UserError, match="same family"):
        components._check_reader_family(settings)
    for recipe in (RSearch(use_evidence=False), RSearch(reader_weight=0.0)):
        components._check_reader_family(dataclasses.replace(settings, recipe=recipe))
    for reader in ("", "assets/miniwiki-reader"):  # none, and one of Llama's architecture
        components._check_reader_family(dataclasses.replace(settings, reader=reader))
