"""RL runs from their configs: identity, and errors before anything is written."""

import pytest

from rrl.errors import UserError
from rrl.setup.settings import TrainSettings
from rrl.train.experiment import identity_of, run
from tests.train import made


def test_the_identity_of_a_run_ignores_settings_that_do_not_affect_results(monkeypatch):
    monkeypatch.chdir(made.ROOT)
    monkeypatch.setattr("rrl.train.experiment.folder_hash", str)
    identities = []
    for name, value in (("stall_seconds", 300.0), ("stall_seconds", 1.0), ("rows", 32)):
        changed = made.config("rsearch_grpo")
        changed.rollout[name] = value
        identities.append(identity_of(TrainSettings.from_config(changed)))
    assert identities[0] == identities[1] != identities[2]


def test_an_error_after_loading_leaves_no_workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(made.ROOT)
    made.save_random_policy(tmp_path / "policy")
    wrong = made.shrink_run(made.config("search_r1", f"steps=1,policy={tmp_path / 'policy'}"))
    wrong.optim.frozen = ("nope",)
    with pytest.raises(UserError, match="nope"):
        run(wrong, tmp_path / "run")
    assert not (tmp_path / "run").exists()
