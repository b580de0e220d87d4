"""Launchers answer wrong input with one line and exit code 2."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--config=configs/miniwiki_pretrain.py:step=3"], ["'step'", "'steps'"]),
        (["--config=configs/miniwiki_pretrain.py:steps=many"], ["steps='many'", "whole number"]),
        (["--config=configs/miniwiki_pretrain.py", "--config.optim.lrr=1"], ["lrr"]),
        (["--config=configs/miniwiki_pretrain.py", "--config.optim.lr=fast"], ["fast"]),
        (["--config=configs/nothing.py"], ["configs/nothing.py"]),
        (["--config=configs/miniwiki_pretrain.py", "--workdir="], ["workdir"]),
        ([], ["config"]),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(tmp_path, flags, words):
    work = [] if any("workdir" in flag for flag in flags) else [f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "launch/sft.py", *work, *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and all(word in done.stderr for word in words), done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert not (tmp_path / "run").exists()
