"""Configs of the trained baselines: published settings (SPEC.md 6), and a run of each from cold start to policy."""

import pytest

from rrl.errors import UserError
from rrl.recipes.card import read_card
from rrl.recipes.r1_searcher import R1Searcher
from rrl.recipes.research import ReSearch
from rrl.recipes.search_r1 import SearchR1
from rrl.runs.metrics import read_metrics
from rrl.setup.settings import CRITIC_SECTIONS, TrainSettings
from rrl.sft import stages
from rrl.train import experiment
from tests.train.made import ROOT, config, save_random_policy, shrink_cold_start, shrink_run

NAMES = ("search_r1", "r1_searcher", "research_grpo")


def settings(name, arg=""):
    return TrainSettings.parse(config(name, arg))


def paper(name, size="7b", more=""):
    return settings(name, f"size={size},data=FOLDER,encoder=FOLDER{more}")


@pytest.mark.parametrize("size", ["3b", "7b"])
def test_search_r1_with_grpo_has_the_published_settings(size):
    run = paper("search_r1", size)
    train, objective = run.train, run.train.objective
    assert run.recipe == SearchR1() and train.critic is None
    assert (run.rollout.top_k, run.rollout.context, run.rollout.top_p) == (3, 4096, 1.0)
    assert (train.questions, train.samples, train.temperature, train.steps) == (512, 5, 1.0, 500)
    assert (train.optim.lr, train.optim.warmup_ratio, train.optim.weight_decay) == (1e-6, 0.285, 0)
    assert (objective.kl_coef, objective.kl_estimator, objective.kl_in) == (0.001, "k3", "loss")
    assert (objective.clip_low, objective.clip_high) == (0.2, 0.2)
    assert train.questions * train.samples // objective.minibatches == 256
    assert run.policy == f"models/Qwen2.5-{size.upper()}-Instruct"


def test_search_r1_with_ppo_has_a_critic_and_the_kl_in_the_reward():
    run, tiny = paper("search_r1", more=",algorithm=ppo"), settings("search_r1", "algorithm=ppo")
    objective = run.train.objective
    assert (run.train.critic.optim.lr, run.train.critic.discount, run.train.critic.gae_lambda) == (1e-5, 1, 1)
    assert (run.train.optim.warmup_ratio, run.train.critic.optim.warmup_ratio) == (0.285, 0.015)
    assert (objective.kl_coef, objective.kl_estimator, objective.kl_in) == (0.001, "k1", "reward")
    assert objective.whiten and run.train.samples == 1
    assert run.train.questions // objective.minibatches == 256
    assert tiny.train.critic.warmup_steps == 2 and tiny.train.objective.drop_spread is None
    assert (tiny.train.steps, tiny.train.questions, tiny.train.samples) == (54, 128, 1)
    assert tiny.train.critic.optim == settings("rsearch_ppo").train.critic.optim
    assert not any(name in config("search_r1") for name in CRITIC_SECTIONS)


def test_one_argument_makes_search_r1_reward_exact_match_only():
    assert paper("search_r1", more=",reward=em").recipe == SearchR1(use_format=False)
    assert paper("search_r1", more=",prompt=bare").recipe == SearchR1(instruction="")


def test_r1_searcher_uses_reinforce_plus_plus_in_two_stages_selected_by_an_argument():
    second, first = paper("r1_searcher"), paper("r1_searcher", more=",stage=1")
    assert (second.recipe, first.recipe) == (R1Searcher(), R1Searcher(stage=1))
    assert (second.train.steps, first.train.steps) == (8148 // 64, 350 // 64)
    train, objective = second.train, second.train.objective
    assert (train.questions, train.samples, train.optim.lr) == (64, 16, 2e-6)
    assert train.questions * train.samples // objective.minibatches == 256
    for run in (second, settings("r1_searcher")):
        # The advantage of a token is the reward minus the KL from there on, whitened over the batch.
        assert run.recipe.advantage == "reward" and run.train.objective.whiten
        assert run.train.objective.kl_in_reward and run.train.objective.kl_estimator == "k1"
        assert run.train.guard.reward == -run.recipe.malformed_penalty  # the lowest possible reward
    assert first.train.guard.reward == 0  # stage 1 has no penalty
    assert second.recipe.malformed_penalty == 2.0 and settings("r1_searcher").recipe.malformed_penalty == 0.5
    assert second.rollout.top_k == 3 and second.recipe.environment.max_searches == 8  # SPEC.md 6
    assert second.policy == "models/Qwen2.5-7B"  # a base model
    assert paper("r1_searcher", more=",prompt=instruct").recipe == R1Searcher(opening="instruct")


def test_research_has_the_settings_of_the_paper():
    run = paper("research_grpo")
    train, objective = run.train, run.train.objective
    assert run.recipe == ReSearch()
    assert (run.rollout.top_k, run.rollout.context) == (5, 8192)  # SPEC.md 6
    assert (objective.kl_coef, objective.clip_low, objective.clip_high) == (0.001, 0.2, 0.2)
    assert (train.questions, train.samples, train.optim.lr, train.steps) == (256, 5, 1e-6, 155)
    assert paper("research_grpo", more=",prompt=base").recipe == ReSearch(opening="base")


@pytest.mark.parametrize("name", NAMES)
def test_in_the_built_in_world_each_baseline_starts_from_its_own_cold_start(name):
    run = settings(name)
    recipe = name.removesuffix("_grpo")
    assert run.policy == f"runs/{recipe}_cold_start/model"
    demonstrations = config("miniwiki_cold_start", f"recipe={recipe}").data.demonstrations
    assert (demonstrations.recipe, demonstrations.number) == (
        recipe,
        {"search_r1": 150, "r1_searcher": 75, "research": 100}[recipe],
    )
    for field, value in demonstrations.recipe_options.items():
        assert getattr(run.recipe, field) == value
    for field in ("max_searches", "turn_tokens", "observation_tokens", "correction"):
        assert getattr(run.recipe.environment, field) == demonstrations.environment[field]
    assert (run.rollout.top_k, run.rollout.context) == (2, 1024)


@pytest.mark.parametrize("name", NAMES)
def test_fields_can_be_overridden_and_wrong_arguments_are_refused(name):
    filled = config(name, "steps=2")
    assert filled.recipe.environment.when_full == "end" and filled.data.held_out_per_kind == 8
    filled.recipe.environment.search = ("<|a|>", "<|b|>")
    assert TrainSettings.parse(filled).recipe.environment.stops[0] == "<|b|>"
    with pytest.raises(UserError, match="config argument steps=-1 must be at least 0"):
        config(name, "steps=-1")
    with pytest.raises(UserError, match="unknown config argument 'stages'"):
        config(name, "stages=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arg", "parts"),
    [
        ("search_r1", "", {"answer", "format"}),
        ("search_r1", ",algorithm=ppo,reward=em", {"answer", "format"}),
        ("r1_searcher", "", {"answer", "format"}),
        ("r1_searcher", ",stage=1", {"retrieval", "format"}),
        ("research_grpo", "", {"answer", "format"}),
    ],
)
def test_a_cold_start_and_a_training_step_run_in_the_built_in_world(tmp_path, monkeypatch, name, arg, parts):
    monkeypatch.chdir(ROOT)
    save_random_policy(tmp_path / "random")
    recipe = name.removesuffix("_grpo")
    given = f"recipe={recipe},init={tmp_path}/random,retriever=bm25,steps=1,demonstrations=5"
    cold = shrink_cold_start(config("miniwiki_cold_start", given))
    assert stages.run(cold, tmp_path / "cold").stopped == "done"
    assert read_card(tmp_path / "cold" / "model").recipe == recipe

    run = shrink_run(config(name, f"policy={tmp_path}/cold/model,retriever=bm25,steps=1{arg}"))
    run.objective.drop_spread = None  # an untrained policy gets equal rewards in every group
    outcome = experiment.run(run, tmp_path / "run")
    assert outcome.step == 1
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    (trained,) = [row for row in rows if "train/em" in row]
    assert {f"reward/{part}" for part in (*parts, "total")} <= set(trained)
    assert trained["train/well_formed"] == 0 and trained["train/left_out"] == 0
    evaluated = [row for row in rows if "eval/em" in row]
    assert {"eval/em", "eval/f1", "eval/cem", "eval/searches"} <= set(evaluated[-1])
    assert read_card(tmp_path / "run" / "policy").make() == TrainSettings.parse(run).recipe
