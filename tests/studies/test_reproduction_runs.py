"""Tests of the planned runs and of the queue that executes them."""

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import time

import pytest

from rrl.errors import UserError
from rrl.parallel.runtime import available_cores
from rrl.runs.launcher import load_config
from rrl.studies.reproduction import queue
from rrl.studies.reproduction.claims import CLAIMS
from rrl.studies.reproduction.manifest import RunManifest, load_manifest, manifest_mismatch, resolved_settings
from rrl.studies.reproduction.plan import PlannedRun, planned_runs, with_dependencies
from rrl.studies.reproduction.queue import core_shares, run_queue

ROOT = pathlib.Path(__file__).parents[2]
SEEDS = (0, 1, 2)


def test_the_plan_has_all_runs_of_all_claims_in_order_and_fits_three_hours_on_two_cores():
    known = planned_runs(SEEDS)
    names = list(known)
    assert all(name in known for claim in CLAIMS for name in claim.needs(SEEDS))
    assert all(names.index(need) < names.index(run.name) for run in known.values() for need in run.needs)
    assert sum(run.minutes for run in known.values()) < 2 * 180
    wanted = {
        run.name for run in with_dependencies([n for claim in CLAIMS for n in claim.needs(SEEDS)], known)
    }
    assert wanted == set(known)  # no run is planned that no claim reads
    assert [run.name for run in with_dependencies(["r2ag_cold-eval"], known)] == [
        "r2ag_cold",
        "r2ag_cold-eval",
    ]


@pytest.mark.parametrize("smoke", [False, True])
def test_every_planned_command_is_accepted_by_its_launcher(smoke, tmp_path):
    for run in planned_runs([0], smoke).values():
        _, config, _, *fields = run.command(tmp_path)
        made = load_config(config.removeprefix("--config="), [f.removeprefix("--config.") for f in fields])
        assert {
            "train": "critic" in made or "objective" in made,
            "sft": "stage" in made,
            "eval": "method" in made,
        }[run.launcher]


class PythonRun(PlannedRun):
    """A run whose command is a line of Python."""

    def command(self, out):
        return ["-c", self.launcher.replace("{out}", str(out))]


def python_run(name, line, needs=()):
    return PythonRun(name, line, "configs/eval.py", 1, needs=needs)


def write(name):
    return f"open('{{out}}/{name}', 'a').write('x')"


def test_finished_runs_are_skipped_and_failed_ones_are_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    second = python_run("b", f"{write('b.txt')}; 1 / 0", ("a",))
    plan = [
        python_run("a", write("a.txt")),
        second,
        python_run("c", write("c.txt"), ("b",)),
        python_run("d", write("d.txt")),
    ]
    found = run_queue(plan, tmp_path, 1, lambda text: None)
    assert set(found.failed) == {"b", "c"} and "exit code 1" in found.failed["b"]
    assert "ZeroDivisionError" in (tmp_path / "b.log").read_text()
    seconds = load_manifest(plan[1], tmp_path).seconds
    run_queue(plan, tmp_path, 1, lambda text: None)
    assert [(tmp_path / f"{name}.txt").exists() for name in "abcd"] == [True, True, False, True]
    assert [(tmp_path / f"{name}.txt").read_text() for name in "abd"] == ["x", "xx", "x"]
    assert load_manifest(plan[1], tmp_path).seconds > seconds > 0  # summed over both attempts


def test_a_run_of_another_command_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    run_queue([python_run("a", write("a.txt"))], tmp_path, 1, lambda text: None)
    with pytest.raises(UserError, match=r"a was made by .*delete that folder"):
        run_queue(
            [python_run("b", write("b.txt")), python_run("a", write("z.txt"))], tmp_path, 1, lambda text: None
        )
    assert not (tmp_path / "b.txt").exists()


def test_a_manifest_matches_by_settings_not_by_comments(tmp_path):
    file = tmp_path / "config.py"
    text = "from ml_collections import ConfigDict\n\n\ndef get_config(arg=''):\n    return ConfigDict({'lr': 0.1, 'b': 2})\n"
    run = PythonRun("a", write("a.txt"), f"{file}:seed=1", 1, {"b": 3})
    file.write_text(text)
    run_queue([run], tmp_path, 1, lambda text: None)
    file.write_text('"""What it is for."""\n\n' + text)
    assert load_manifest(run, tmp_path).finished
    file.write_text(text.replace("'b': 2", "'b': 2, 'c': {'later': 1}"))
    assert load_manifest(run, tmp_path).finished  # a field added since
    file.write_text(text.replace("'lr': 0.1, ", ""))
    with pytest.raises(UserError, match=r"a was made with lr=0\.1, which is None today"):
        load_manifest(run, tmp_path)
    file.write_text(text.replace("0.1", "0.2"))
    with pytest.raises(UserError, match=r"a was made with lr=0\.1, which is 0\.2 today; delete that folder"):
        load_manifest(run, tmp_path)
    with pytest.raises(UserError, match="was made with b=3, which is 4 today"):
        load_manifest(dataclasses.replace(run, fields={"b": 4}), tmp_path)


def test_a_manifest_matches_another_command_that_resolves_to_the_same_settings(tmp_path, monkeypatch):
    """For example if a default has changed since, and the plan now states the old value."""
    monkeypatch.chdir(ROOT)
    cold = PlannedRun("a", "sft", "configs/miniwiki_cold_start.py:recipe=r3rag", 1)
    named = dataclasses.replace(cold, config=f"{cold.config},demonstrations=100")
    manifest = RunManifest(cold.command("{out}"), resolved_settings(cold), "abc")
    assert manifest_mismatch(manifest, named) == ""
    assert "was made by" in manifest_mismatch(
        manifest, dataclasses.replace(cold, config=f"{cold.config},demonstrations=99")
    )
    fewer = {name: value for name, value in manifest.settings["train"].items() if name != "minutes"}
    earlier = dataclasses.replace(manifest, settings={**manifest.settings, "train": fewer})
    assert (
        manifest_mismatch(earlier, cold) == manifest_mismatch(earlier, named) == ""
    )  # the field minutes was added since
    # The default was 99 when it ran.
    few = {**manifest.settings["data"]["demonstrations"], "number": 99}
    moved = {**manifest.settings, "data": {**manifest.settings["data"], "demonstrations": few}}
    moved = dataclasses.replace(manifest, settings=moved)
    assert (
        manifest_mismatch(moved, dataclasses.replace(cold, config=f"{cold.config},demonstrations=99")) == ""
    )
    assert "was made with data.demonstrations.number=99, which is 100" in manifest_mismatch(moved, cold)
    timed = dataclasses.replace(named, fields={"train.minutes": 0.0})
    assert manifest_mismatch(earlier, timed) == ""  # the same as the default
    assert "was made by" in manifest_mismatch(
        earlier, dataclasses.replace(timed, fields={"train.minutes": 2.0})
    )
    strange = [flag.replace("recipe=", "system=") for flag in manifest.command]
    assert "was made by" in manifest_mismatch(dataclasses.replace(manifest, command=strange), named)
    assert "was made by" in manifest_mismatch(manifest, dataclasses.replace(named, name="b"))


def test_with_another_command_a_field_added_since_counts_as_its_default(monkeypatch):
    monkeypatch.chdir(ROOT)
    plain = PlannedRun("a", "train", "configs/r3rag_ppo.py:steps=22", 1)
    whole, half = (dataclasses.replace(plain, fields={"critic.layers": layers}) for layers in (0, 2))
    settings = resolved_settings(whole)
    assert resolved_settings(plain)["critic"]["layers"] == 2
    del settings["critic"]["layers"]
    manifest = RunManifest(plain.command("{out}"), settings, "abc")
    assert manifest_mismatch(manifest, whole) == ""
    assert "was made by" in manifest_mismatch(manifest, half)
    nameless = dataclasses.replace(manifest, settings={**settings, "recipe": {}})
    assert "was made by" in manifest_mismatch(nameless, whole)


def test_a_stored_number_matches_the_automatic_value_of_today(monkeypatch):
    monkeypatch.chdir(ROOT)
    run = PlannedRun("a", "train", "configs/r1_searcher.py:steps=4", 1)
    settings = resolved_settings(run)
    assert settings["guard"]["reward"] == -0.5 and settings["objective"]["drop_spread"] is None
    manifest = RunManifest(run.command("{out}"), settings, "abc")
    assert manifest_mismatch(manifest, run) == ""
    given = dataclasses.replace(run, fields={"guard.reward": -0.5})
    assert manifest_mismatch(manifest, given) == ""
    assert "was made by" in manifest_mismatch(
        manifest, dataclasses.replace(run, fields={"guard.reward": 0.0})
    )
    del settings["guard"]["reward"]
    assert manifest_mismatch(dataclasses.replace(manifest, settings=settings), given) == ""


@pytest.mark.skipif(available_cores() < 2, reason="two runs side by side need two cores")
def test_two_runs_execute_at_the_same_time_on_separate_cores(tmp_path, monkeypatch):
    assert sorted(core for share in core_shares(2) for core in share) == sorted(os.sched_getaffinity(0))
    with pytest.raises(UserError, match="jobs=0 must be 1 to"):
        core_shares(0)
    monkeypatch.chdir(ROOT)
    # Each waits until the other has started, for at most five minutes.
    wait = (
        "import pathlib, time; {mine}; end = time.monotonic() + 300\n"
        "while not pathlib.Path('{{out}}/{other}').exists():\n    time.sleep(0.01); assert time.monotonic() < end"
    )
    plan = [
        python_run(mine, wait.format(mine=write(mine + ".txt"), other=other + ".txt"))
        for mine, other in (("a", "b"), ("b", "a"))
    ]
    assert not run_queue(plan, tmp_path, 2, lambda text: None).failed


def test_a_signal_ends_the_runs_and_the_same_call_continues(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    line = "import pathlib, time; f = pathlib.Path('{out}/there'); new = not f.exists(); f.touch()\ntime.sleep(300 * new)"
    plan = [python_run("a", line)]

    def stop(_):
        while not (tmp_path / "there").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), queue.signal.SIGTERM)

    assert run_queue(plan, tmp_path, 1, stop).stopped
    manifest = load_manifest(plan[0], tmp_path)
    assert not manifest.finished
    assert not run_queue(plan, tmp_path, 1, lambda text: None).stopped
    assert load_manifest(plan[0], tmp_path).finished


@pytest.mark.slow
def test_a_run_that_survives_its_killed_parent_still_holds_the_lock(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    there = tmp_path / "pid"
    line = "import os, pathlib, time; file = pathlib.Path('{out}/pid'); new = not file.exists()\n"
    line += "file.write_text(str(os.getpid())); time.sleep(300 * new)"
    plan = [python_run("a", line)]
    script = (
        "import pathlib\nfrom rrl.studies.reproduction import plan, queue\n"
        f"class PythonRun(plan.PlannedRun):\n    def command(self, out): return ['-c', {line!r}.replace('{{out}}', str(out))]\n"
        f"queue.run_queue([PythonRun('a', 'train', {plan[0].config!r}, 1)], pathlib.Path({str(tmp_path)!r}), 1)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)})
    while not (there.exists() and there.read_text()):
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    with pytest.raises(UserError, match="another process is running there"):
        run_queue(plan, tmp_path, 1, lambda text: None)
    os.kill(int(there.read_text()), queue.signal.SIGKILL)
    for _ in range(1000):
        with contextlib.suppress(UserError):
            assert not run_queue(plan, tmp_path, 1, lambda text: None).failed
            break
        time.sleep(0.01)
    assert load_manifest(plan[0], tmp_path).finished
