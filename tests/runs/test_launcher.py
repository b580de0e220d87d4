"""Launchers report wrong input in one line with exit code 2."""

import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from rrl.runs.launcher import default_workdir, load_config
from tests.launching import launch

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--config=configs/miniwiki_pretrain.py:step=3"], ["'step'", "'steps'"]),
        (["--config=configs/miniwiki_pretrain.py:steps=many"], ["steps='many'", "whole number"]),
        (["--config=configs/miniwiki_pretrain.py:steps=0"], ["train.steps=0"]),
        (
            ["--config=configs/miniwiki_pretrain.py", "--config.optim.lrr=1"],
            ["--config.optim.lrr: config.optim has no field 'lrr'; its fields are adam_lr, b1"],
        ),
        (
            ["--config=configs/miniwiki_pretrain.py", "--config.trian.rows=1"],
            ["config has no field 'trian'; its fields are compute, data"],
        ),
        (
            ["--config=configs/miniwiki_pretrain.py", "--config.optim.lr=fast"],
            ["--config.optim.lr='fast' must be a number"],
        ),
        (
            ["--config=configs/miniwiki_pretrain.py", "--config.optim.frozen=('[',"],
            ["--config.optim.frozen=", "must be a tuple"],
        ),
        (
            ["--config=configs/miniwiki_pretrain.py:steps=many", "--config.optim.lrr=1"],
            ["steps='many'", "whole number"],
        ),
        (["--config=configs/nothing.py"], ["configs/nothing.py"]),
        (["--config=configs/miniwiki_pretrain.py", "--workdir="], ["workdir"]),
        ([], ["config"]),
    ],
)
def test_wrong_input_prints_one_line_and_exits_with_code_2(tmp_path, flags, words):
    work = [] if any("workdir" in flag for flag in flags) else [f"--workdir={tmp_path / 'run'}"]
    done = launch("sft", *work, *flags)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and all(word in done.stderr for word in words), done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: "), done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "folder"),
    [
        ("configs/miniwiki_pretrain.py", "runs/pretrain"),  # the next stage reads it there
        ("configs/miniwiki_pretrain.py:steps=2,out=some/folder", "runs/pretrain-steps=2-out=some-folder"),
        ("elsewhere/mine.py", "runs/mine"),
    ],
)
def test_the_default_workdir_is_named_after_config_and_arguments(config, folder):
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "", flag_values=values)
    values["config"].parse(config)
    assert default_workdir(values["config"]) == folder


def test_a_long_argument_gives_a_folder_name_that_the_file_system_accepts(tmp_path):
    arg = f"out={'deep/' * 60}model"
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "", flag_values=values)
    values["config"].parse(f"configs/miniwiki_pretrain.py:{arg}")
    names = [default_workdir(values["config"]).removeprefix("runs/")]
    names += [load_config(f"configs/eval.py:method=direct,corpus={arg}", []).name]
    names += [load_config(f"configs/rsearch_grpo.py:policy={arg.removeprefix('out=')}", []).name]
    for name in names:
        (tmp_path / name).mkdir()


@pytest.mark.parametrize(
    ("launcher", "flags", "message"),
    [
        (
            "train",
            ["--config=configs/rsearch_grpo.py:steps=-5"],
            "config argument steps=-5 must be at least 0",
        ),
        (
            "train",
            ["--config=configs/rsearch_grpo.py", "--config.train.steps=-5"],
            "train.steps=-5 must be at least 0",
        ),
        (
            "encoder",
            ["--config=configs/miniwiki_encoder.py:steps=-1"],
            "training.steps=-1 must be at least 1",
        ),
        (
            "train",
            [
                "--config=configs/rsearch_grpo.py",
                "--config.train.checkpoint_every=7",
                "--config.objective.minibatches=2",
                "--noconfig.recipe.use_evidence",
                "--config.recipe.environment.failure=none",
                "--config.data.world_size=100",
                "--config.data.kinds=('one_hop',)",
                "--config.optim.b1=0.8",
                "--config.optim.adam_lr=1e-3",
                "--config.optim.clip_norm=2.5",
                "--config.rollout.max_wait_steps=0",  # the overrides above it were accepted
            ],
            "rollout.max_wait_steps=0 must be at least 1",
        ),
    ],
)
def test_fields_can_be_overridden_and_their_values_are_checked(tmp_path, launcher, flags, message):
    done = launch(launcher, f"--workdir={tmp_path / 'run'}", *flags)
    assert done.returncode == 2 and f"error: {message}" in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workdir=nowhere"], "workdir nowhere has no folder checkpoints"),
        (["--workdir=nowhere", "--dtype=int8"], "int8"),
        ([], "--workdir"),
    ],
)
def test_an_impossible_export_prints_one_line_and_writes_nothing(tmp_path, flags, message):
    done = launch("export", f"--out={tmp_path / 'deep' / 'out'}", *flags)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: "), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--help", "--helpshort", "--helpfull", "-?"])
def test_help_exits_with_code_0(flag):
    done = subprocess.run(
        [sys.executable, "launch/score.py", flag],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "--predictions" in done.stdout


@pytest.mark.parametrize("name", ["train", "eval"])
def test_help_lists_the_flags_that_launchers_share(name):
    done = launch(name, "--help")
    assert done.returncode == 0 and "--config: Config file" in done.stdout and "--workdir: " in done.stdout


def test_a_config_in_another_folder_can_import_the_project_configs(tmp_path):
    (tmp_path / "own.py").write_text(
        "from configs import rsearch_grpo\n\n\ndef get_config(arg=''):\n    return rsearch_grpo.get_config('steps=nonsense')\n"
    )
    command = [sys.executable, str(ROOT / "launch/train.py"), f"--config={tmp_path / 'own.py'}"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "steps" in done.stderr and "No module" not in done.stderr


def test_a_shipped_config_is_the_same_from_every_current_folder(tmp_path, monkeypatch):
    here = load_config("configs/rsearch_grpo.py:steps=3", []).to_json()
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/rsearch_grpo.py:steps=3", []).to_json() == here
    (tmp_path / "configs").mkdir()
    own = "from ml_collections import ConfigDict\n\n\ndef get_config(arg):\n    return ConfigDict({'name': arg})\n"
    (tmp_path / "configs/rsearch_grpo.py").write_text(own)
    assert load_config("configs/rsearch_grpo.py:steps=3", []).to_dict() == {"name": "steps=3"}


@pytest.mark.parametrize(
    "given", [["--config=configs/rsearch_grpo.py:step=3"], ["--config", "configs/rsearch_grpo.py:step=3"]]
)
def test_a_launcher_finds_a_shipped_config_from_another_folder(tmp_path, given):
    command = [sys.executable, str(ROOT / "launch/train.py"), *given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown config argument 'step'" in done.stderr
