"""A comparison: the commands of each arm, and the table of what they reached."""

import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from rrl.errors import UserError
from rrl.files import SaveError
from rrl.stopping import Stopped
from rrl.studies.compare import ArmRun, arm_runs, commands, compare, table_rows, wait_for, with_arguments

ROOT = pathlib.Path(__file__).parents[2]


def finish(arm_run, before, after, minutes):
    arm_run.workdir.mkdir(parents=True, exist_ok=True)
    lines = [
        {"step": 0, "eval/em": before, "eval/f1": before, "minutes": 0.0},
        {"step": 1, "train/em": 0.5},
        {"step": 2, "eval/em": after, "eval/f1": after, "minutes": minutes},
    ]
    arm_run.metrics.write_text("\n".join(map(json.dumps, lines)))


def test_supervised_training_goes_on_as_long_as_grpo_took(tmp_path):
    plan = arm_runs(tmp_path, ["GRPO", "SFT continued"], [0])
    first, second = commands(plan[1], "configs/x.py:size=tiny", "configs/cold.py:init=P", 8.5)
    assert "--config=configs/cold.py:init=P,seed=1,minutes=8.50" in first
    assert second[1].startswith("--config=configs/x.py:size=tiny,steps=0,policy=")


def test_the_table_tells_the_metric_that_is_asked_for(tmp_path):
    (arm_run,) = arm_runs(tmp_path, ["GRPO"], [0])
    finish(arm_run, 0.1, 0.2, 1.0)
    lines = [json.loads(line) for line in arm_run.metrics.read_text().splitlines()]
    lines[0]["eval/full_recall"], lines[2]["eval/full_recall"] = 0.5, 0.75
    arm_run.metrics.write_text("\n".join(map(json.dumps, lines)))
    head, _, row = table_rows([arm_run], "full_recall")
    assert "full recall before" in head and row.split()[2:5] == ["50.0", "75.0", "+25.0"]
    assert table_rows([arm_run])[2].split()[2:5] == ["10.0", "20.0", "+10.0"]
    with pytest.raises(UserError, match=r"metric='recall' is not in .*; there are em, f1, full_recall"):
        table_rows([arm_run], "recall")


def test_the_supervised_arm_needs_grpo_before_it(tmp_path):
    for arms in (["SFT continued"], ["SFT continued", "GRPO"]):
        with pytest.raises(UserError, match="'GRPO' before it"):
            arm_runs(tmp_path, arms, [0])


def test_the_table_gives_mean_and_every_seed(tmp_path):
    plan = arm_runs(tmp_path, ["GRPO", "SFT continued"], [0, 1])
    for arm_run, after in zip(plan, (0.5, 0.42, 0.6, 0.38), strict=True):
        finish(arm_run, 0.4, after, 8.0)
    text = "\n".join(table_rows(plan))
    assert "+15.0" in text
    assert "+10.0 +20.0" in text
    assert "+2.0 -2.0" in text


def test_an_unknown_arm_is_named(tmp_path):
    with pytest.raises(UserError, match="magic"):
        arm_runs(tmp_path, ["magic"], [0])


def test_arguments_are_added_to_a_config_flag():
    assert with_arguments("a.py", "x=1", "") == "a.py:x=1"
    assert with_arguments("a.py:y=2", "x=1") == "a.py:y=2,x=1"


def test_an_argument_that_is_given_already_is_replaced(tmp_path):
    assert with_arguments("a.py:steps=2,quick", "steps=0", "quick") == "a.py:steps=0,quick"
    _, evaluation = commands(
        arm_runs(tmp_path, ["GRPO", "SFT continued"], [0])[1], "x.py:steps=2", "c.py", 1.0
    )
    assert evaluation[1].startswith("--config=x.py:steps=0,policy=")


@pytest.mark.parametrize(("arms", "seeds"), [([], [0]), (["GRPO"], []), (["GRPO"], [1, 1])])
def test_arms_and_seeds_are_one_or_more_each_once(tmp_path, arms, seeds):
    with pytest.raises(UserError, match="one or more, each once"):
        arm_runs(tmp_path, arms, seeds)


def test_an_arm_may_be_any_argument_of_the_config_or_another_config_file(tmp_path):
    arms = ["ablation=none", "ablation=filter", "configs/rsearch_ppo.py", "configs/r2ag.py:control=permuted"]
    plan = arm_runs(tmp_path, arms, [1])
    config = "configs/tiresrag_grpo.py:steps=2,ablation=naive"
    told = [commands(arm_run, config, "", 0.0)[0][1].removeprefix("--config=configs/") for arm_run in plan]
    assert told == [
        "tiresrag_grpo.py:steps=2,ablation=none,seed=1",
        "tiresrag_grpo.py:steps=2,ablation=filter,seed=1",
        "rsearch_ppo.py:steps=2,ablation=naive,seed=1",
        "r2ag.py:steps=2,ablation=naive,seed=1,control=permuted",
    ]
    assert [arm_run.workdir.name for arm_run in plan] == [
        "ablation=none-1",
        "ablation=filter-1",
        "configs_rsearch_ppo.py-1",
        "configs_r2ag.py_control=permuted-1",
    ]
    with pytest.raises(UserError, match=r"arms=\['seed=3', 'configs/r2ag.py:seed=2'\] are unknown"):
        arm_runs(tmp_path, ["GRPO", "seed=3", "configs/r2ag.py:seed=2"], [1])
    with pytest.raises(UserError, match="one folder"):
        arm_runs(tmp_path, ["policy=a/b", "policy=a:b"], [1])


class Sweep:
    """A comparison whose runs are not started: each ends with `code` and leaves what a run leaves."""

    def __init__(self, folder):
        self.root, self.code, self.ran = folder / "out", 0, []
        self.config, self.cold_start = folder / "config.py", folder / "cold_start.py"
        for file in (self.config, self.cold_start):
            file.write_text("lr = 1")

    def __call__(self, arguments="", arms=("GRPO",), **given):
        config, cold_start = f"{self.config}:{arguments}", f"{self.cold_start}:init=P"
        return compare(config, cold_start, self.root, arms, [0], **given)

    def start(self, command, **_):
        self.ran.append(command)
        arm_run = ArmRun("", 0, pathlib.Path(command[-1].removeprefix("--workdir=")))
        if self.code != 2:
            finish(arm_run, 0.4, 0.5, 8.0)
        if self.code == 0:
            (arm_run.workdir / "summary.txt").write_text("")
        return types.SimpleNamespace(wait=lambda: self.code)


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    made = Sweep(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", made.start)
    return made


def test_arms_of_a_config_s_argument_end_in_one_table(sweep):
    text = sweep("steps=2", ["lr=1", "lr=2"])
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["lr=1", "lr=2"]


def test_the_plot_runs_over_minutes_or_updates(sweep, monkeypatch):
    axes = []
    monkeypatch.setattr("rrl.studies.compare.plot_spread", lambda *_, x, **__: axes.append(x))
    sweep()
    sweep(over="updates")
    assert axes == ["minutes", "step"]
    for arms, over in ((["GRPO"], "tokens"), (["GRPO", "SFT continued"], "updates")):
        with pytest.raises(UserError, match=f"over='{over}' must be minutes or updates"):
            sweep(arms=arms, over=over)


@pytest.mark.parametrize("code", [143, -9])
def test_a_run_that_a_signal_stopped_is_named_and_continued_by_the_same_command(sweep, code):
    sweep.code = code
    with pytest.raises(Stopped, match=r"GRPO-0 was stopped by a signal.*the same command continues"):
        sweep()
    sweep.code = 0
    assert "+10.0" in sweep()
    assert len(sweep.ran) == 2


def test_a_finished_run_is_kept_for_the_same_commands_and_refused_for_others(sweep):
    sweep("steps=2")
    sweep("steps=2")
    assert len(sweep.ran) == 1
    with pytest.raises(UserError, match=r"out/GRPO-0 was made by .*steps=2.*not by .*steps=3"):
        sweep("steps=3")
    sweep.config.write_text("lr = 2")
    with pytest.raises(UserError, match=r"out/GRPO-0 was made by"):
        sweep("steps=2")


@pytest.mark.parametrize("name", ["compare.png", "compare.jsonl", "compare.txt"])
def test_a_folder_in_the_place_of_the_comparisons_file_is_a_failed_save(sweep, name):
    (sweep.root / name).mkdir(parents=True)
    with pytest.raises(SaveError, match=rf"{name} could not be saved: a folder is in its place"):
        sweep()


def test_a_record_that_cannot_be_read_is_named(sweep):
    sweep("steps=2")
    (record,) = sweep.root.glob("*/command.json")
    record.write_bytes(b"\xff" + record.read_bytes())
    with pytest.raises(
        UserError, match=r"GRPO-0/command\.json, .* cannot be read \(it is not UTF-8\); put back"
    ):
        sweep("steps=2")
    record.unlink()
    record.mkdir()
    with pytest.raises(UserError, match=r"GRPO-0/command\.json, .* cannot be read \(Is a directory\)"):
        sweep("steps=2")


def test_a_run_that_was_refused_leaves_no_record(sweep):
    sweep.code = 1
    with pytest.raises(subprocess.CalledProcessError):
        sweep("steps=2")
    sweep.code = 2
    (record,) = sweep.root.glob("*/command.json")
    record.unlink()
    with pytest.raises(subprocess.CalledProcessError):
        sweep("step=2")
    assert not record.exists()
    sweep.code = 0
    sweep("steps=2")


def test_ctrl_c_waits_for_the_run_to_save():
    codes = iter([KeyboardInterrupt, KeyboardInterrupt, 143])

    def wait():
        code = next(codes)
        if code is KeyboardInterrupt:
            raise code
        return code

    assert wait_for(types.SimpleNamespace(wait=wait)) == 143


def test_runs_of_other_models_are_not_put_in_one_table(sweep):
    sweep("", ["GRPO", "search off"])
    plan = arm_runs(sweep.root, ["GRPO", "search off"], [0])

    def made(arm_run, policy="p", encoder="e"):
        run = {"policy": policy, "reader": "r", "retriever": {"encoder": encoder}}
        (arm_run.workdir / "config.json").write_text(json.dumps({"run": run}))

    made(plan[0])
    made(plan[1], encoder="")  # search off needs none
    sweep("", ["GRPO", "search off"])
    made(plan[1], policy="other")
    with pytest.raises(
        UserError, match=r"GRPO-0 and .*search_off-0 had other models \(policy: p and other\)"
    ):
        sweep("", ["GRPO", "search off"])


def test_arms_of_other_config_files_may_start_from_other_policies_which_is_told(sweep):
    arms = ("lr=1", "lr=2", "configs/rsearch_ppo.py", "configs/rsearch_ppo.py:lr=3")
    sweep("", arms)
    plan = arm_runs(sweep.root, arms, [0])
    for arm_run, policy in zip(plan, "ppqq", strict=True):
        run = {"policy": policy, "reader": "", "retriever": {"encoder": "e"}}
        (arm_run.workdir / "config.json").write_text(json.dumps({"run": run}))
    told = '* policy (SHA-256) differs: lr=1, lr=2: "p"; configs/rsearch_ppo.py, configs/rsearch_ppo.py:lr=3: "q"'
    assert sweep("", arms).splitlines()[-1] == told
    run["policy"] = "other"
    (plan[-1].workdir / "config.json").write_text(json.dumps({"run": run}))
    with pytest.raises(UserError, match=r"had other models \(policy: q and other\)"):
        sweep("", arms)


def test_arms_with_other_passages_or_another_retriever_are_told_below_the_table(sweep):
    arms = ("lr=1", "lr=2")
    assert "differs" not in sweep("", arms)
    for arm_run, kind in zip(arm_runs(sweep.root, arms, [0]), ("scann", "bm25"), strict=True):
        made = {
            "policy": "p",
            "reader": "",
            "data": {"path": "x"},
            "rollout": {"top_k": 2, "rows": len(kind)},
        }
        run = made | {"retriever": {"encoder": "", "kind": kind}}
        (arm_run.workdir / "config.json").write_text(json.dumps({"run": run}))
    text = sweep("", arms)
    assert text.splitlines()[-1] == '* retriever.kind differs: lr=1: "scann"; lr=2: "bm25"'
    assert text.count("differs") == 1 and (sweep.root / "compare.txt").read_text() == f"{text}\n"


def test_processes_with_seeds_of_their_own_share_a_folder_and_the_last_one_shows_all(sweep):
    def seeds(*given):
        return compare(f"{sweep.config}", f"{sweep.cold_start}:init=P", sweep.root, ["GRPO"], given)

    seeds(0, 10)
    (sweep.root / "GRPO-3").mkdir()  # the other process's, not finished
    text = seeds(2)
    assert "0 2 10" in text and "+10.0 +10.0 +10.0" in text
    lines = [json.loads(line) for line in (sweep.root / "compare.jsonl").read_text().splitlines()]
    assert [(line["seed"], line["eval/em"]) for line in lines if line["step"] == 2] == [
        (0, 0.5),
        (2, 0.5),
        (10, 0.5),
    ]


@pytest.mark.parametrize("arguments", ["seed=3", "steps=2,control=permuted"])
def test_arguments_that_the_comparison_sets_are_refused(sweep, arguments):
    with pytest.raises(UserError, match="which the comparison sets"):
        sweep(arguments)


def test_the_record_of_supervised_training_holds_its_config_but_not_its_minutes(sweep):
    arms = ("GRPO", "SFT continued")
    sweep("", arms)
    finish(arm_runs(sweep.root, arms, [0])[0], 0.4, 0.5, 9.0)
    sweep("", arms)
    assert len(sweep.ran) == 3
    sweep.cold_start.write_text("lr = 2")
    sweep()
    with pytest.raises(UserError, match="SFT_continued-0 was made by"):
        sweep("", arms)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--config=configs/rsearch_grpo.py:step=2"], 2, "'step'"),
        (["--config=configs/nothing.py"], 2, "configs/nothing.py"),
        (["--arms=SFT continued,GRPO"], 2, "'GRPO' before it"),
        (["--arms="], 2, "arms=[]"),
        (["--seeds="], 2, "seeds=[]"),
        (["--config={broken}"], 1, "exit code 1"),
    ],
)
def test_what_goes_wrong_is_one_error_line_and_its_exit_code(tmp_path, flags, code, words):
    (tmp_path / "broken.py").write_text("import ml_collections\n\n\ndef get_config(arg):\n    return 1 / 0\n")
    flags = [flag.format(broken=tmp_path / "broken.py") for flag in flags]
    done = subprocess.run(
        [sys.executable, "launch/compare.py", f"--out={tmp_path / 'out'}", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and words in errors[0], done.stderr
    assert "Traceback" not in done.stderr or code == 1
    assert not (tmp_path / "out").exists()
