"""Tests of the evaluation commands: a killed evaluation continues, sweep and report write their files,
wrong input ends with one line."""

import csv
import os
import pathlib
import subprocess
import sys
import time

import pytest

from rrl.eval.results import read_lines
from tests.launching import launch

ROOT = pathlib.Path(__file__).parents[2]
FEW = ("--config.rollout.rows=8", "--config.data.worlds=1")


def command(name: str, *flags: str) -> list[str]:
    return [sys.executable, f"launch/{name}.py", *flags]


def run(name: str, *flags: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command(name, *flags), cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_a_killed_evaluation_continues_and_is_reported(tmp_path: pathlib.Path) -> None:
    flags = ("--config=configs/eval.py:method=rsearch,questions=300", f"--workdir={tmp_path / 'run'}", *FEW)
    process = subprocess.Popen(
        command("eval", *flags),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    file = tmp_path / "run/results.jsonl"
    while process.poll() is None and not (file.exists() and file.read_bytes().count(b"\n") > 5):
        time.sleep(0.05)
    process.kill()
    process.wait()
    before = [line["id"] for line in read_lines(file)]
    assert 5 < len(before) < 300 and not (tmp_path / "run/metrics.json").exists()
    done = run("eval", *flags)
    assert done.returncode == 0, done.stderr
    lines = read_lines(file)
    assert [line["id"] for line in lines][: len(before)] == before and len(lines) == 300
    assert "left=" in done.stderr and "300 questions, percent" in done.stdout
    reported = run("report", f"--out={tmp_path / 'out'}", str(tmp_path / "run"))
    assert reported.returncode == 0, reported.stderr
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "report.csv",
        "report.html",
        "report.md",
    ]
    assert "| run | assets/miniwiki-policy |" in reported.stdout


@pytest.mark.slow
def test_a_sweep_varies_a_field_and_writes_a_table_and_a_plot(tmp_path: pathlib.Path) -> None:
    flags = (
        "--config=configs/eval.py:method=rsearch,questions=10",
        "--vary=recipe.environment.max_searches",
        "--values=1,4",
        "--set=rollout.rows=8",
        "--set=data.worlds=1",
        f"--out={tmp_path}",
    )
    done = run("sweep", *flags)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert [row["recipe.environment.max_searches"] for row in rows] == ["1", "4"]
    assert float(rows[0]["searches"]) <= 1 < float(rows[1]["searches"])
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG") and "sweep.png" in done.stdout


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("eval", ("--config=configs/eval.py:method=nope",), "method='nope' is unknown; recipes are"),
        ("report", ("/none",), "run /none: not an evaluation"),
        (
            "sweep",
            ("--vary=rollout.top", "--values=1"),
            "--config.rollout.top: config.rollout has no field 'top'",
        ),
    ],
)
def test_wrong_input_ends_with_one_error_line(
    tmp_path: pathlib.Path, name: str, flags: tuple[str, ...], words: str
) -> None:
    out = tmp_path / "out"
    found = launch(name, *flags, f"--{'workdir' if name == 'eval' else 'out'}={out}")
    assert found.returncode == 2, found.stderr
    assert found.stderr.count("\n") == 1 and found.stderr.startswith("error: ") and words in found.stderr
    assert not out.exists()
