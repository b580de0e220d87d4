"""R2AG's config: the settings of the paper, and a run from cold start to drawn trees that resumes exactly."""

import json
import os
import subprocess
import sys

import pytest

from rrl.errors import UserError
from rrl.recipes.card import read_card
from rrl.recipes.r2ag import R2AG, R2AGEnvironment
from rrl.runs.checkpoint_reader import saved_metadata
from rrl.runs.metrics import read_metrics
from rrl.setup.settings import TrainSettings
from rrl.sft import stages
from rrl.train import experiment
from rrl.train import loop as rl
from tests.train import made
from tests.train.made import ROOT, save_random_policy, shrink_cold_start


def config(arg="", name="r2ag"):
    return made.config(name, arg)


@pytest.mark.parametrize("size", ["3b", "7b"])
def test_the_large_sizes_have_the_settings_of_the_paper(size):
    # SPEC.md 4; appendix B.2 and C.2
    settings = TrainSettings.parse(config(f"size={size},data=FOLDER,encoder=FOLDER"))
    train, objective = settings.train, settings.train.objective
    assert (train.questions, train.samples, train.temperature, train.steps) == (128, 12, 1.0, 80)
    assert (train.optim.name, train.optim.lr, train.eval_temperature) == ("adamw", 1e-6, 0.6)
    assert (objective.clip_low, objective.clip_high, objective.kl_coef) == (0.2, 0.28, 0)
    assert (objective.aggregation, objective.drop_spread) == ("group_token_mean", 0)  # Eq. 6
    assert settings.recipe == R2AG() and settings.rollout.top_k == 1
    assert settings.recipe.environment.expansions == 5
    assert settings.policy == {"3b": "models/Qwen2.5-3B-Instruct", "7b": "models/Qwen3-8B"}[size]


def test_the_update_shares_the_prompt_among_the_samples_of_a_group():
    settings = TrainSettings.parse(config())
    objective = settings.train.objective
    assert objective.share_prefixes and objective.row_lengths[-1] >= 2 * settings.rollout.context


@pytest.mark.parametrize(
    ("arg", "base", "predicted", "k"),
    [
        ("", 4, 2, 1),
        ("t=half", 2, 1, 1),
        ("predictions=off,top_k=2", 4, 0, 2),
        ("hops=2,t=half,predictions=off", 1, 0, 1),
    ],
)
def test_arguments_select_the_inference_settings(arg, base, predicted, k):
    # SPEC.md 4: base-only or with anticipatory predictions; top-k 1 or 2; t = M or M/2
    settings = TrainSettings.parse(config(f"size=7b,data=FOLDER,{arg}".rstrip(",")))
    expected = R2AGEnvironment(base_queries=base, predicted_queries=predicted)
    assert settings.recipe.environment == expected and settings.rollout.top_k == k


def test_a_config_without_queries_is_refused():
    with pytest.raises(UserError, match="config argument hops=0 must be at least 1"):
        config("hops=0")


@pytest.mark.slow
def test_a_killed_run_from_cold_start_to_trees_resumes_to_the_same_forest(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    save_random_policy(tmp_path / "random")
    cold = config(
        f"recipe=r2ag,init={tmp_path}/random,retriever=bm25,steps=1,demonstrations=5", "miniwiki_cold_start"
    )
    assert stages.run(shrink_cold_start(cold), tmp_path / "cold").stopped == "done"
    assert (
        read_card(tmp_path / "cold" / "model").top_k == 1
    )  # as in training and use; its scripted expert retrieves 2 passages

    def run(workdir, die_after=None):
        run = config(f"policy={tmp_path}/cold/model,retriever=bm25,steps=4")
        run.data.update(
            {"train_worlds": 1, "held_out_worlds": 1, "held_out_per_kind": 1, "train_per_kind": 4}
        )
        run.train.update({"questions": 2, "samples": 2, "checkpoint_every": 2, "eval_every": 0})
        run.rollout.update({"rows": 4, "context": 256, "wake_threshold": 4})
        run.objective.row_lengths = (256,)
        run.recipe.trees = 3
        run.recipe.environment.turn_tokens = 8
        steps, sample = 0, rl.sample_and_score

        def sample_and_score(*arguments):
            nonlocal steps
            steps += 1
            if steps == die_after:
                raise ConnectionError("the machine went away")
            return sample(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(rl, "sample_and_score", sample_and_score)
            return run, experiment.run(run, workdir)

    settings, outcome = run(tmp_path / "whole")
    assert outcome.step == 4
    with pytest.raises(ConnectionError):
        run(tmp_path / "died", die_after=4)
    run(tmp_path / "died")
    forests = [saved_metadata(tmp_path / name, 4)["curriculum"] for name in ("whole", "died")]
    assert (
        forests[0] == forests[1] and forests[0]["level"] == 1
    )  # 3 trees: steps with 2 and 1 of them, then a second pass
    whole, died = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "died"))
    trained = [[row["reward/total"] for row in rows if "reward/total" in row] for rows in (whole, died)]
    assert trained[0] == trained[1] and len(trained[0]) == 4
    (last,) = [row for row in whole if row["step"] == 4 and "eval/em" in row]
    assert {
        "eval/full_recall",
        "eval/recall",
        "eval/map",
        "eval/passages",
        "eval/hits",
        "eval/iterations",
    } <= set(last)
    assert "eval/full_recall/three_hop" in last
    assert read_card(tmp_path / "whole" / "policy").make() == TrainSettings.parse(settings).recipe
    assert "Passages found" in (tmp_path / "whole" / "summary.txt").read_text()

    flags = [
        f"--config=configs/r2ag.py:policy={tmp_path}/cold/model,retriever=bm25,steps=4",
        f"--workdir={tmp_path}/whole",
        "--config.data.held_out_worlds=1",
        "--config.data.held_out_per_kind=1",
        "--config.data.train_worlds=1",
    ]
    done = subprocess.run(
        [sys.executable, "launch/trees.py", *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "at equal K" in done.stdout and "(5 questions)" in done.stdout
    assert (tmp_path / "whole" / "trees.html").read_text().count("<svg") == 5
    lines = (tmp_path / "whole" / "trajectories.jsonl").read_text().splitlines()
    assert all("documents" not in json.loads(line)["question"] for line in lines)
