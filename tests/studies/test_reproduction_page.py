"""Tests of the measurement store and of the page that is made from it."""

import dataclasses
import gzip
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from rrl.errors import UserError
from rrl.studies.reproduction.claims import CLAIMS
from rrl.studies.reproduction.manifest import RunManifest, resolved_settings
from rrl.studies.reproduction.options import RunOptions
from rrl.studies.reproduction.page import reproduction_page
from rrl.studies.reproduction.plan import PlannedRun, planned_runs
from rrl.studies.reproduction.reproduce import reproduce
from rrl.studies.reproduction.store import MeasurementStore
from rrl.studies.reproduction.verdict import FAILS, MISSING
from tests.eval.runs import finished

ROOT = pathlib.Path(__file__).parents[2]
SEEDS = (0, 1, 2)
FINISHED_ONLY = RunOptions(execute=False)


ANSWERS = {"a": "Norway", "b": "Ada Berg", "c": "1947", "d": "yes"}


def measured_in(out, name, answers):
    """Write the files of a finished evaluation."""
    finished(out / name, answers)
    recorded(planned_runs(SEEDS)[name], out)


def recorded(run, out, seconds=90.0):
    out.mkdir(exist_ok=True)
    RunManifest(run.command("{out}"), resolved_settings(run), "abc", seconds, True).save(
        out / f"{run.name}.json"
    )


def row_of(file, key):
    (row,) = [line for line in file.read_text().splitlines() if line.startswith(f"| {key} |")]
    return row


def test_the_page_shows_measured_claims_and_lists_missing_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    known = planned_runs(SEEDS)
    measured_in(tmp_path, "naive_rag", ANSWERS)
    measured_in(tmp_path, "direct", {"d": "yes"})
    file = tmp_path / "page.md"
    reproduce(tmp_path, file, FINISHED_ONLY)
    text = file.read_text()
    assert "| 100.0 against 25.0 | +75.0 [+25.0, +100.0] | 4 | **holds** |" in row_of(file, "naive-rag")
    assert row_of(file, "process").endswith(f"| – | – | – | {MISSING} |")
    assert "- process: `python launch/reproduce.py --only=process` (6 runs)" in text
    assert f"\nholds: 1; {MISSING}: {len(CLAIMS) - 1}." in text
    assert f"2 of {len(known)} runs, 3 core minutes in total" in text and "Commit abc." in text
    assert "- passages of a search: 2\n" in text and "python 3" in text  # from the result cards
    store = MeasurementStore(tmp_path / "kept", known)
    assert "smoke" not in text
    assert "smoke run" in reproduction_page(known, tmp_path, store, SEEDS, "python x", smoke=True)
    other = tmp_path / "other"
    measured_in(other, "naive_rag", {"d": "yes"})
    measured_in(other, "direct", ANSWERS)
    reproduce(other, file, FINISHED_ONLY)
    assert row_of(file, "naive-rag").endswith(
        f"| 25.0 against 100.0 | -75.0 [-100.0, -25.0] | 4 | **{FAILS}** |"
    )


def test_the_store_makes_the_page_without_the_runs_and_they_are_not_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    out, keep, file = tmp_path / "out", tmp_path / "kept", tmp_path / "page.md"
    measured_in(out, "naive_rag", ANSWERS)
    measured_in(out, "direct", {"d": "yes"})
    reproduce(out, file, FINISHED_ONLY, store_folder=keep, command="x")
    first = file.read_text()
    files = {each.name: each.read_bytes() for each in keep.iterdir()}
    assert sorted(files) == ["direct.json.gz", "naive_rag.json.gz"]
    reproduce(out, file, FINISHED_ONLY, store_folder=keep, command="x")
    assert {each.name: each.read_bytes() for each in keep.iterdir()} == files

    shutil.rmtree(out)
    # Nothing is executed.
    assert not reproduce(out, file, RunOptions(), store_folder=keep, only=["naive-rag"], command="x").failed
    assert file.read_text() == first and not out.exists()
    capsys.readouterr()
    reproduce(out, file, RunOptions(list_only=True), store_folder=keep, only=["naive-rag", "iterative"])
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()[:-1]] == ["iter_retgen", "ircot"]

    measured_in(out, "direct", ANSWERS)  # repeated: the newer one counts
    (out / "direct.json").write_text((out / "direct.json").read_text().replace("90.0", "30.0"))
    reproduce(out, file, FINISHED_ONLY, store_folder=keep, command="x")
    assert (
        "| 100.0 against 100.0 |" in row_of(file, "naive-rag")
        and "2 core minutes in total" in file.read_text()
    )


def test_the_store_holds_only_the_training_columns_that_claims_read(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = {"a": PlannedRun("a", "train", "configs/rsearch_grpo.py", 1)}
    recorded(plan["a"], tmp_path)
    lines = [{"step": step, "reward/answer": 0.1 * step, "other": 1.0} for step in (1, 2)]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    MeasurementStore(tmp_path / "kept", plan).add_finished(tmp_path)
    found = MeasurementStore(tmp_path / "kept", plan).results((0,)).read_training("a")
    assert [dict(line) for line in found] == [{"step": s, "reward/answer": 0.1 * s} for s in (1, 2)]


def trained_and_evaluated(out, seconds=90.0):
    """Write the files of a finished cold start and two evaluations of it."""
    cold = PlannedRun("cold", "sft", "configs/miniwiki_cold_start.py", 1)
    evaluations = [PlannedRun(name, "eval", "configs/eval.py", 1, needs=("cold",)) for name in ("one", "two")]
    recorded(cold, out, seconds)
    for evaluation in evaluations:
        finished(out / evaluation.name, ANSWERS, model=f"{out}/cold/model", command=f"python x --out={out}")
        recorded(evaluation, out)
    return {run.name: run for run in (cold, *evaluations)}


def test_measurements_are_outdated_if_an_indirect_starting_model_was_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    cold = PlannedRun("cold", "sft", "configs/miniwiki_cold_start.py", 1)
    middle = PlannedRun("middle", "sft", "configs/miniwiki_cold_start.py", 1, needs=("cold",))
    look = PlannedRun("look", "eval", "configs/eval.py", 1, needs=("middle",))
    plan, out, again = {run.name: run for run in (cold, middle, look)}, tmp_path / "out", tmp_path / "again"
    for run in (cold, middle):
        recorded(run, out)
    finished(out / "look", ANSWERS, model=f"{out}/middle/model", command="python x")
    recorded(look, out)
    MeasurementStore(tmp_path / "kept", plan).add_finished(out)
    assert set(MeasurementStore(tmp_path / "kept", plan).entries) == {"cold", "middle", "look"}
    recorded(cold, again, 91.0)
    store = MeasurementStore(tmp_path / "kept", plan)
    store.add_finished(again)
    assert set(store.entries) == {"cold"} and set(store.outdated) == {"middle", "look"}


def test_measurements_are_outdated_if_their_starting_model_was_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    out, folder = tmp_path / "out", tmp_path / "kept"
    plan = trained_and_evaluated(out)
    MeasurementStore(folder, plan).add_finished(out)
    assert not MeasurementStore(folder, plan).missing_runs(["one", "two"], tmp_path / "nothing")
    card = MeasurementStore(folder, plan).entries["one"].card
    assert (card.model, card.command) == ("{out}/cold/model", "python x --out={out}")
    (folder / "two.json.gz").unlink()
    missing_runs = MeasurementStore(folder, plan).missing_runs
    assert [run.name for run in missing_runs(["one", "two"], out)] == [
        "cold",
        "two",
    ]  # its model still exists
    assert [run.name for run in missing_runs(["one", "two"], tmp_path / "nothing")] == ["cold", "one", "two"]

    again = tmp_path / "again"
    trained_and_evaluated(again, seconds=91.0)
    (again / "one.json").unlink()
    store = MeasurementStore(folder, plan)
    store.add_finished(again)
    for each in (store, MeasurementStore(folder, plan)):
        assert set(each.entries) == {"cold", "two"}
        assert each.outdated == {"one": "started from cold, which was repeated since"}


def test_measurements_made_with_other_settings_are_ignored(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    out, keep, file = tmp_path / "out", tmp_path / "kept", tmp_path / "page.md"
    measured_in(out, "naive_rag", ANSWERS)
    measured_in(out, "direct", {"d": "yes"})
    reproduce(out, file, FINISHED_ONLY, store_folder=keep)
    changed = {
        "naive_rag": dataclasses.replace(
            planned_runs(SEEDS)["naive_rag"], fields={"prompted.most_passages": 3}
        )
    }
    assert (
        "naive_rag" in MeasurementStore(keep, changed).outdated
        and not MeasurementStore(keep, changed).entries
    )
    monkeypatch.setattr(
        "rrl.studies.reproduction.reproduce.planned_runs", lambda *_: planned_runs(SEEDS) | changed
    )
    reproduce(out, file, FINISHED_ONLY, store_folder=keep)  # neither from the store nor from the folder
    assert "naive_rag was made by launch/eval.py" in capsys.readouterr().err
    assert MISSING in row_of(file, "naive-rag")


def test_the_published_page_matches_the_published_measurements(monkeypatch):
    """If settings or texts changed on purpose, write the page again:
    `python launch/reproduce.py --norun --keep=docs/reproduction --page=docs/reproduction.md`."""
    monkeypatch.chdir(ROOT)
    known = planned_runs(SEEDS)
    store = MeasurementStore(ROOT / "docs" / "reproduction", known)
    command = "python launch/reproduce.py --keep=docs/reproduction"
    made = reproduction_page(known, pathlib.Path("runs/reproduce"), store, SEEDS, command)
    assert made == (ROOT / "docs" / "reproduction.md").read_text()


def test_no_page_is_written_if_nothing_is_finished(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    file = tmp_path / "page.md"
    file.write_text("published")
    with pytest.raises(
        UserError, match=r"no run is finished in .*out, and no measurement is stored in .*none"
    ):
        reproduce(tmp_path / "out", file, FINISHED_ONLY, store_folder=tmp_path / "none")
    assert file.read_text() == "published"
    with pytest.raises(UserError, match="is a file; give a folder"):
        reproduce(tmp_path / "out", file, FINISHED_ONLY, store_folder=file)


def test_a_damaged_file_of_the_store_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    measured_in(tmp_path, "direct", ANSWERS)
    known = {"direct": planned_runs(SEEDS)["direct"]}
    MeasurementStore(tmp_path / "kept", known).add_finished(tmp_path)
    file = tmp_path / "kept" / "direct.json.gz"
    whole = file.read_bytes()
    values = json.loads(gzip.decompress(whole))
    flipped = whole[:40] + bytes(byte ^ 255 for byte in whole[40:60]) + whole[60:]
    others = [
        {},
        [],
        values | {"record": {"made": 1}},
        values | {"evaluation": {}},
        values | {"card": {"method": ""}},
    ]
    for content in (
        b"x",
        whole[:50],
        flipped,
        *(gzip.compress(json.dumps(each).encode()) for each in others),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"direct\.json\.gz is damaged .*delete it"):
            MeasurementStore(tmp_path / "kept", known)


def start(*flags):
    return subprocess.run(
        [sys.executable, "launch/reproduce.py", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_wrong_input_ends_with_one_error_line_and_writes_nothing(tmp_path):
    done = start(f"--out={tmp_path / 'out'}", f"--page={tmp_path / 'page.md'}", "--only=magic")
    assert done.returncode == 2 and "error: only=magic is unknown" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_claims_run_end_to_end_and_are_not_repeated(tmp_path):
    flags = ("--smoke", "--only=naive-rag,rl", "--seeds=0", f"--out={tmp_path / 'out'}")
    done = start(*flags)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out" / "reproduction.md").read_text()
    verdicts = dict(re.findall(r"^\| ([\w-]+) \|.*\| (.*) \|$", text, re.MULTILINE))
    assert verdicts["rl"] != MISSING and verdicts["naive-rag"] != MISSING and verdicts["tree"] == MISSING
    assert "This is a smoke run" in text
    assert json.loads((tmp_path / "out" / "rsearch-0.json").read_text())["finished"]
    again = start(*flags)
    assert again.returncode == 0 and "..." not in again.stderr
