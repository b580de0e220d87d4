"""A run killed at random moments and continued leaves the same files as an uninterrupted run, except for times."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from rrl.runs.checkpoint_reader import saved_metadata, saved_steps
from tests.runs.event_files import scalars_of
from tests.train import made

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 12
TIMES = re.compile(r"(time|memory|rollout)/.*|minutes|seconds|.*tokens_per_second")
"""Names of values that differ between two runs of one config: times, speeds, memory."""
BY_CONTENT = ("checkpoints", "tensorboard")
"""Folders whose files differ in names and bytes in each run (random ids, times, process ids); their content is compared."""


def without_times(value):
    if isinstance(value, dict):
        return {name: without_times(v) for name, v in value.items() if not TIMES.fullmatch(name)}
    return value


def content(file: pathlib.Path) -> object:
    """Return the content of a file without times."""
    if file.name == "metrics.jsonl":
        return [list(without_times(json.loads(line)).items()) for line in file.read_text().splitlines()]
    if file.name == "summary.txt":
        return re.sub(r"minutes .* of this command", "", file.read_text())
    return file.read_bytes()


def files_of(workdir: pathlib.Path) -> dict[str, object]:
    names = (f.relative_to(workdir) for f in sorted(workdir.rglob("*")) if f.is_file())
    return {str(name): content(workdir / name) for name in names if name.parts[0] not in BY_CONTENT}


def checkpoints_of(workdir: pathlib.Path) -> dict[int, object]:
    """Return, by step, each checkpoint's metadata without times and its arrays by name."""
    found = {}
    for step in saved_steps(workdir):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            arrays = reader.restore(workdir / "checkpoints" / str(step) / "state")
        leaves = jax.tree_util.tree_leaves_with_path(arrays)
        found[step] = (
            without_times(saved_metadata(workdir, step)),
            {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves},
        )
    return found


def events_of(workdir: pathlib.Path) -> list[tuple[str, int, float]]:
    """Return the scalars of TensorBoard without times, each once: a kill between writes to the two files repeats one."""
    return list(dict.fromkeys(point for point in scalars_of(workdir) if not TIMES.fullmatch(point[0])))


@pytest.mark.parametrize(("name", "kills"), [("grpo", 20), ("ppo", 6), ("sft", 8)])
def test_a_run_killed_at_random_moments_leaves_the_files_of_an_uninterrupted_run(tmp_path, name, kills):
    policy, workdir = tmp_path / "policy", tmp_path / "run"
    made.save_random_policy(policy)
    launcher = "launch/sft.py" if name == "sft" else "launch/train.py"
    flags = [f"--config=tests/train/killed_config.py:{name},{policy}", f"--workdir={workdir}"]
    done = subprocess.run(
        [
            sys.executable,
            "tests/train/killed_lives.py",
            str(kills),
            str(workdir),
            str(STEPS),
            launcher,
            *flags,
        ],
        cwd=ROOT,
        # GLIBC_TUNABLES prevents the launcher from restarting itself for glibc's huge pages.
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0",
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, (tmp_path / "run.log").read_text()[-5000:]
    assert len(json.loads(done.stdout)["killed"]) == kills
    compare(tmp_path / "run.whole", workdir)


def compare(whole: pathlib.Path, killed: pathlib.Path) -> None:
    """Assert that two workdirs have the same content."""
    expected, found = files_of(whole), files_of(killed)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name] == value, name
    assert {"metrics.jsonl", "config.json"} < set(found)
    jax.tree.map(np.testing.assert_array_equal, checkpoints_of(killed), checkpoints_of(whole))
    assert events_of(killed) == events_of(whole)
