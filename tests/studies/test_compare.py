"""Tests of comparisons: the commands of each arm, and the table of their results."""

import json
import pathlib
import subprocess
import types

import pytest

from rrl.errors import UserError
from rrl.files import SaveError
from rrl.stopping import RunStopped
from rrl.studies.arm_comparison.arms import ArmRun, arm_runs, commands
from rrl.studies.arm_comparison.compare import compare, wait_for
from rrl.studies.arm_comparison.measurements import table_rows
from tests.launching import launch


def finish(arm_run, before, after, minutes):
    arm_run.workdir.mkdir(parents=True, exist_ok=True)
    lines = [
        {"step": 0, "eval/em": before, "eval/f1": before, "minutes": 0.0},
        {"step": 1, "train/em": 0.5},
        {"step": 2, "eval/em": after, "eval/f1": after, "minutes": minutes},
    ]
    arm_run.metrics.write_text("\n".join(map(json.dumps, lines)))


def test_the_supervised_arm_trains_for_as_many_minutes_as_grpo(tmp_path):
    plan = arm_runs(tmp_path, ["GRPO", "SFT continued"], [0])
    first, second = commands(plan[1], "configs/x.py:size=tiny", "configs/cold.py:init=P", 8.5)
    assert "--config=configs/cold.py:init=P,seed=1,minutes=8.50" in first
    assert second[1].startswith("--config=configs/x.py:size=tiny,steps=0,policy=")


def test_the_table_shows_the_requested_metric(tmp_path):
    (arm_run,) = arm_runs(tmp_path, ["GRPO"], [0])
    finish(arm_run, 0.1, 0.2, 1.0)
    lines = [json.loads(line) for line in arm_run.metrics.read_text().splitlines()]
    lines[0]["eval/full_recall"], lines[2]["eval/full_recall"] = 0.5, 0.75
    arm_run.metrics.write_text("\n".join(map(json.dumps, lines)))
    head, _, row = table_rows([arm_run], "full_recall")
    assert "full recall before" in head and row.split()[2:5] == ["50.0", "75.0", "+25.0"]
    assert table_rows([arm_run])[2].split()[2:5] == ["10.0", "20.0", "+10.0"]
    with pytest.raises(UserError, match=r"metric='recall' is not in .*; choose em, f1, full_recall"):
        table_rows([arm_run], "recall")


def test_the_supervised_arm_must_come_after_grpo(tmp_path):
    for arms in (["SFT continued"], ["SFT continued", "GRPO"]):
        with pytest.raises(UserError, match="'GRPO' before it"):
            arm_runs(tmp_path, arms, [0])


def test_the_table_shows_the_mean_gain_and_the_gain_of_each_seed(tmp_path):
    plan = arm_runs(tmp_path, ["GRPO", "SFT continued"], [0, 1])
    for arm_run, after in zip(plan, (0.5, 0.42, 0.6, 0.38), strict=True):
        finish(arm_run, 0.4, after, 8.0)
    text = "\n".join(table_rows(plan))
    assert "+15.0" in text
    assert "+10.0 +20.0" in text
    assert "+2.0 -2.0" in text


def test_an_unknown_arm_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="magic"):
        arm_runs(tmp_path, ["magic"], [0])


def test_steps_of_the_config_are_replaced_for_the_evaluation_of_the_supervised_arm(tmp_path):
    _, evaluation = commands(
        arm_runs(tmp_path, ["GRPO", "SFT continued"], [0])[1], "x.py:steps=2", "c.py", 1.0
    )
    assert evaluation[1].startswith("--config=x.py:steps=0,policy=")


@pytest.mark.parametrize(("arms", "seeds"), [([], [0]), (["GRPO"], []), (["GRPO"], [1, 1])])
def test_empty_or_duplicate_arms_and_seeds_are_refused(tmp_path, arms, seeds):
    with pytest.raises(UserError, match="one or more, each once"):
        arm_runs(tmp_path, arms, seeds)


def test_an_arm_may_be_any_config_argument_or_another_config_file(tmp_path):
    arms = ["ablation=none", "ablation=filter", "configs/rsearch_ppo.py", "configs/r2ag.py:control=permuted"]
    plan = arm_runs(tmp_path, arms, [1])
    config = "configs/tiresrag_grpo.py:steps=2,ablation=naive"
    configs = [commands(arm_run, config, "", 0.0)[0][1].removeprefix("--config=configs/") for arm_run in plan]
    assert configs == [
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


class FakeComparison:
    """A comparison without real runs: each ends with the exit code `code` and writes the files of a run."""

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
def comparison(tmp_path, monkeypatch):
    fake = FakeComparison(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", fake.start)
    return fake


def test_arms_that_are_config_arguments_share_one_table(comparison):
    text = comparison("steps=2", ["lr=1", "lr=2"])
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["lr=1", "lr=2"]


def test_the_x_axis_of_the_plot_is_minutes_or_updates(comparison, monkeypatch):
    axes = []
    monkeypatch.setattr("rrl.studies.arm_comparison.compare.plot_spread", lambda *_, x, **__: axes.append(x))
    comparison()
    comparison(over="updates")
    assert axes == ["minutes", "step"]
    for arms, over in ((["GRPO"], "tokens"), (["GRPO", "SFT continued"], "updates")):
        with pytest.raises(UserError, match=f"over='{over}' must be minutes or updates"):
            comparison(arms=arms, over=over)


@pytest.mark.parametrize("code", [143, -9])
def test_a_run_stopped_by_a_signal_is_continued_by_the_same_command(comparison, code):
    comparison.code = code
    with pytest.raises(RunStopped, match=r"GRPO-0 was stopped by a signal.*the same command continues"):
        comparison()
    comparison.code = 0
    assert "+10.0" in comparison()
    assert len(comparison.ran) == 2


def test_a_finished_run_is_reused_for_the_same_commands_and_refused_for_others(comparison):
    comparison("steps=2")
    comparison("steps=2")
    assert len(comparison.ran) == 1
    with pytest.raises(UserError, match=r"out/GRPO-0 was made by .*steps=2.*not by .*steps=3"):
        comparison("steps=3")
    comparison.config.write_text("lr = 2")
    with pytest.raises(UserError, match=r"out/GRPO-0 was made by"):
        comparison("steps=2")


@pytest.mark.parametrize("name", ["compare.png", "compare.jsonl", "compare.txt"])
def test_a_folder_at_the_path_of_a_result_file_is_a_save_error(comparison, name):
    (comparison.root / name).mkdir(parents=True)
    with pytest.raises(SaveError, match=rf"{name} could not be saved: a folder is in its place"):
        comparison()


def test_an_unreadable_command_json_is_refused_by_name(comparison):
    comparison("steps=2")
    (record,) = comparison.root.glob("*/command.json")
    record.write_bytes(b"\xff" + record.read_bytes())
    with pytest.raises(
        UserError, match=r"GRPO-0/command\.json, .* cannot be read \(it is not UTF-8\); restore"
    ):
        comparison("steps=2")
    record.unlink()
    record.mkdir()
    with pytest.raises(UserError, match=r"GRPO-0/command\.json, .* cannot be read \(Is a directory\)"):
        comparison("steps=2")


def test_a_refused_run_writes_no_command_json(comparison):
    comparison.code = 1
    with pytest.raises(subprocess.CalledProcessError):
        comparison("steps=2")
    comparison.code = 2
    (record,) = comparison.root.glob("*/command.json")
    record.unlink()
    with pytest.raises(subprocess.CalledProcessError):
        comparison("step=2")
    assert not record.exists()
    comparison.code = 0
    comparison("steps=2")


def test_ctrl_c_waits_until_the_run_has_saved():
    codes = iter([KeyboardInterrupt, KeyboardInterrupt, 143])

    def wait():
        code = next(codes)
        if code is KeyboardInterrupt:
            raise code
        return code

    assert wait_for(types.SimpleNamespace(wait=wait)) == 143


def test_runs_with_different_models_at_the_same_path_are_refused(comparison):
    comparison("", ["GRPO", "search off"])
    plan = arm_runs(comparison.root, ["GRPO", "search off"], [0])

    def made(arm_run, policy="p", encoder="e"):
        run = {"policy": policy, "reader": "r", "retriever": {"encoder": encoder}}
        (arm_run.workdir / "config.json").write_text(json.dumps({"run": run}))

    made(plan[0])
    made(plan[1], encoder="")  # search off uses no encoder
    comparison("", ["GRPO", "search off"])
    made(plan[1], policy="other")
    with pytest.raises(
        UserError, match=r"GRPO-0 and .*search_off-0 used different models \(policy: p and other\)"
    ):
        comparison("", ["GRPO", "search off"])


def test_arms_of_other_config_files_may_start_from_other_policies_and_the_table_notes_it(comparison):
    arms = ("lr=1", "lr=2", "configs/rsearch_ppo.py", "configs/rsearch_ppo.py:lr=3")
    comparison("", arms)
    plan = arm_runs(comparison.root, arms, [0])
    for arm_run, policy in zip(plan, "ppqq", strict=True):
        run = {"policy": policy, "reader": "", "retriever": {"encoder": "e"}}
        (arm_run.workdir / "config.json").write_text(json.dumps({"run": run}))
    note = '* policy (SHA-256) differs: lr=1, lr=2: "p"; configs/rsearch_ppo.py, configs/rsearch_ppo.py:lr=3: "q"'
    assert comparison("", arms).splitlines()[-1] == note
    run["policy"] = "other"
    (plan[-1].workdir / "config.json").write_text(json.dumps({"run": run}))
    with pytest.raises(UserError, match=r"used different models \(policy: q and other\)"):
        comparison("", arms)


def test_different_corpora_and_retrievers_are_noted_below_the_table(comparison):
    arms = ("lr=1", "lr=2")
    assert "differs" not in comparison("", arms)
    for arm_run, kind in zip(arm_runs(comparison.root, arms, [0]), ("scann", "bm25"), strict=True):
        made = {
            "policy": "p",
            "reader": "",
            "data": {"path": "x"},
            "rollout": {"top_k": 2, "rows": len(kind)},
        }
        run = made | {"retriever": {"encoder": "", "kind": kind}}
        (arm_run.workdir / "config.json").write_text(json.dumps({"run": run}))
    text = comparison("", arms)
    assert text.splitlines()[-1] == '* retriever.kind differs: lr=1: "scann"; lr=2: "bm25"'
    assert text.count("differs") == 1 and (comparison.root / "compare.txt").read_text() == f"{text}\n"


def test_processes_with_different_seeds_share_a_folder_and_the_last_table_holds_all_seeds(comparison):
    def seeds(*given):
        return compare(
            f"{comparison.config}", f"{comparison.cold_start}:init=P", comparison.root, ["GRPO"], given
        )

    seeds(0, 10)
    (comparison.root / "GRPO-3").mkdir()  # a run of the other process, unfinished
    text = seeds(2)
    assert "0 2 10" in text and "+10.0 +10.0 +10.0" in text
    lines = [json.loads(line) for line in (comparison.root / "compare.jsonl").read_text().splitlines()]
    assert [(line["seed"], line["eval/em"]) for line in lines if line["step"] == 2] == [
        (0, 0.5),
        (2, 0.5),
        (10, 0.5),
    ]


@pytest.mark.parametrize("arguments", ["seed=3", "steps=2,control=permuted"])
def test_arguments_that_the_comparison_sets_itself_are_refused(comparison, arguments):
    with pytest.raises(UserError, match="which the comparison sets"):
        comparison(arguments)


def test_the_provenance_of_the_supervised_arm_includes_its_config_but_not_its_minutes(comparison):
    arms = ("GRPO", "SFT continued")
    comparison("", arms)
    finish(arm_runs(comparison.root, arms, [0])[0], 0.4, 0.5, 9.0)
    comparison("", arms)
    assert len(comparison.ran) == 3
    comparison.cold_start.write_text("lr = 2")
    comparison()
    with pytest.raises(UserError, match="SFT_continued-0 was made by"):
        comparison("", arms)


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
def test_a_failure_ends_with_one_error_line_and_its_exit_code(tmp_path, flags, code, words):
    (tmp_path / "broken.py").write_text("import ml_collections\n\n\ndef get_config(arg):\n    return 1 / 0\n")
    flags = [flag.format(broken=tmp_path / "broken.py") for flag in flags]
    done = launch("compare", f"--out={tmp_path / 'out'}", *flags)
    assert done.returncode == code, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and words in errors[0], done.stderr
    assert "Traceback" not in done.stderr or code == 1
    assert not (tmp_path / "out").exists()
