"""TIRESRAG-R1's config: the settings of the paper, Table 7 by one argument, and a run from cold start to policy."""

import os
import subprocess
import sys

import pytest

from rrl.errors import UserError
from rrl.recipes.card import read_card
from rrl.recipes.tiresrag import TiresRag
from rrl.rewards.judge_settings import SECTIONS as JUDGE
from rrl.runs.metrics import read_metrics
from rrl.setup.settings import CRITIC_SECTIONS, TrainSettings
from rrl.sft import stages
from rrl.train import experiment
from tests.train import made
from tests.train.made import ROOT, save_random_policy, shrink_cold_start, shrink_run


def config(arg="", name="tiresrag_grpo"):
    return made.config(name, arg)


def recipe_of(arg):
    return TrainSettings.parse(config(arg)).recipe


@pytest.mark.parametrize("size", ["3b", "7b"])
def test_the_large_sizes_have_the_settings_of_the_paper(size):
    # Appendix C.1; SPEC.md 3 and 6
    settings = TrainSettings.parse(config(f"size={size},data=FOLDER,encoder=FOLDER"))
    train, objective = settings.train, settings.train.objective
    assert (train.questions, train.samples, train.temperature) == (108, 5, 1.0)
    assert (train.optim.lr, train.optim.schedule) == (2e-6, "cosine")
    assert (objective.kl_coef, objective.epochs, objective.clip_low, objective.clip_high) == (0, 2, 0.2, 0.2)
    assert (objective.aggregation, objective.constant_tokens) == ("constant", 1)  # 4.2, as printed
    assert settings.rollout.top_k == 5
    assert settings.recipe == TiresRag()
    assert (settings.judge.judge.kind, settings.judge.judge.folder) == ("model", "models/Qwen3-8B")
    assert train.steps == 8148 // 108
    assert not settings.judge.judge.thinking
    # The judge reads whole trajectories and its own prompt (about a thousand tokens).
    longest = settings.rollout.context + settings.judge.judge.answer_tokens + 1024
    assert settings.judge.rollout.context >= longest


@pytest.mark.parametrize(
    ("row", "changed"),
    [
        ("none", {}),
        ("filter", {"use_filter": False}),
        ("difficulty", {"use_difficulty": False}),
        ("penalty", {"penalty_weight": 0.0}),
        ("reflect", {"reflect_weight": 0.0}),
        ("sufficient", {"sufficient_weight": 0.0}),
        ("thinking", {"thinking_weight": 0.0}),
    ],
)
def test_one_argument_selects_each_row_of_table_7(row, changed):
    assert recipe_of(f"size=3b,data=FOLDER,ablation={row}") == TiresRag(**changed)


def test_naive_grpo_applies_all_ablations_of_table_7_and_needs_no_judge():
    naive = recipe_of("size=3b,data=FOLDER,ablation=naive")
    weights = {f"{name}_weight": 0.0 for name in ("penalty", "reflect", "sufficient", "thinking")}
    assert naive == TiresRag(use_filter=False, use_difficulty=False, **weights)
    assert not naive.needs_judge


@pytest.mark.parametrize(
    ("arg", "changed"),
    [
        ("estimator=reinforce_pp", {"advantage": "reinforce_plus_plus"}),
        ("schedule=linear", {"schedule": "linear"}),
        ("reflect=released", {"reflect_table": "released"}),
        ("prompt=base", {"opening": "base"}),
    ],
)
def test_arguments_select_the_variants_of_the_paper(arg, changed):
    assert recipe_of(f"size=3b,data=FOLDER,{arg}") == TiresRag(**changed)


@pytest.mark.parametrize(
    "arg",
    [
        "ablation=naive,schedule=fast",
        "ablation=naive,reflect=released",
        "ablation=naive,judge=some/folder",
        "ablation=reflect,reflect=released",
    ],
)
def test_an_argument_that_an_ablation_makes_unused_is_refused(arg):
    ablation, other = arg.split(",")
    with pytest.raises(UserError, match=f"argument {other} has no meaning with {ablation}, which removes"):
        config(arg)
    assert config(ablation) != config(other)


def test_the_judge_can_be_an_oracle_a_folder_or_a_service():
    assert TrainSettings.parse(config()).judge.judge.kind == "oracle"
    assert TrainSettings.parse(config("judge=some/folder")).judge.judge.folder == "some/folder"
    judge = TrainSettings.parse(config("judge=http://127.0.0.1:8000/v1,judge_model=m")).judge
    assert (judge.endpoint.url, judge.endpoint.model) == ("http://127.0.0.1:8000/v1", "m")


def test_a_recipe_that_needs_a_judge_is_refused_without_one():
    values = {name: section for name, section in config().to_dict().items() if name not in JUDGE}
    with pytest.raises(UserError, match=r"recipe\.name='tiresrag' needs a judge.*give the section judge"):
        TrainSettings.parse(values)
    values["recipe"] |= {"thinking_weight": 0.0, "sufficient_weight": 0.0, "penalty_weight": 0.0}
    values["recipe"]["use_difficulty"] = False
    assert TrainSettings.parse(values).judge is None


def test_a_config_lists_fields_of_recipe_and_judge():
    filled = config()
    assert filled.judge_endpoint.retries == 6 and filled.judge.answer_tokens == 1024
    assert filled.recipe.penalty_weight == 0.1 and filled.recipe.environment.observation == "information"
    assert not any(name in filled for name in CRITIC_SECTIONS)


@pytest.mark.slow
def test_a_cold_start_and_a_training_step_run_in_the_built_in_world(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    save_random_policy(tmp_path / "random")
    cold = config(
        f"recipe=tiresrag,init={tmp_path}/random,retriever=bm25,steps=1,demonstrations=5",
        "miniwiki_cold_start",
    )
    assert stages.run(shrink_cold_start(cold), tmp_path / "cold").stopped == "done"

    run = shrink_run(config(f"policy={tmp_path}/cold/model,retriever=bm25,steps=1,ablation=filter"))
    outcome = experiment.run(run, tmp_path / "run")
    assert outcome.step == 1
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    (trained,) = [row for row in rows if "train/em" in row]
    assert {"reward/sufficient", "reward/thinking", "reward/reflect", "train/judge_unread"} <= set(trained)
    assert trained["train/auxiliary_weight"] == pytest.approx(1 / (1 + 2.718281828 ** (-0.09)))
    assert trained["train/left_out"] == 0 and trained["reward/thinking"] >= 0
    assert read_card(tmp_path / "run" / "policy").make() == TrainSettings.parse(run).recipe

    command = [sys.executable, "launch/diagnose.py", f"--trajectories={tmp_path}/run/trajectories.jsonl"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert "5 trajectories" in done.stdout and "underthinking" in done.stdout
    refused = subprocess.run(
        [*command, f"--judge={ROOT}/assets/miniwiki-judge"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (
        refused.returncode == 2 and "is asked for ErrorAnalysis" in refused.stderr
    )  # before anything is judged
