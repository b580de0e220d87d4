"""Configs of RL runs: settings, and checks before anything is loaded."""

import dataclasses
import importlib.util
import pathlib

import numpy as np
import pytest
from ml_collections import ConfigDict

from rrl.config.sections import DERIVED, fill_defaults
from rrl.errors import UserError
from rrl.recipes.card import make_card, write_card
from rrl.recipes.rsearch import RSearch
from rrl.rl.advantages import ESTIMATORS
from rrl.rl.optim import OptimConfig
from rrl.setup.settings import SECTIONS, TrainSettings
from tests.eval.fakes import many
from tests.train import made

ROOT = pathlib.Path(__file__).parents[2]


def config(arg: str = "", name: str = "rsearch_grpo"):
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(arg)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Create folders that look like models at the paths of the configs."""
    monkeypatch.chdir(tmp_path)
    shipped = [f"assets/miniwiki-{name}" for name in ("policy", "reader", "encoder")]
    for name in (*shipped, "models/Qwen2.5-7B-Instruct"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    write_card(tmp_path / "assets" / "miniwiki-policy", make_card(RSearch(instruction=""), 1024, 2))
    return tmp_path


def test_the_default_config_uses_the_built_in_world_and_the_shipped_policy(folders):
    settings = TrainSettings.from_config(config())
    assert settings.data.path == "miniwiki"
    assert settings.policy == "assets/miniwiki-policy"
    assert settings.retriever.kind == "scann"
    assert settings.recipe.prompt(type("Q", (), {"text": "Who?"})) == "Who?"


def test_the_large_sizes_have_the_settings_of_the_paper(folders):
    settings = TrainSettings.from_config(config("size=7b,data=.,reader=assets/miniwiki-reader"))
    train = settings.train
    assert (train.steps, train.questions, train.samples) == (195, 256, 5)
    assert (train.optim.lr, train.optim.warmup_ratio) == (1e-6, 0.95)
    assert train.objective.kl_coef == 0.001
    assert (settings.rollout.top_k, settings.rollout.context, settings.rollout.top_p) == (3, 8192, 0.95)
    environment = settings.recipe.environment
    assert (environment.max_searches, environment.turn_tokens, environment.observation_tokens) == (
        4,
        500,
        1800,
    )
    assert (settings.recipe.answer_weight, settings.recipe.evidence_weight) == (0.2, 0.2)
    assert "</search>" in settings.recipe.instruction


def test_ppo_differs_from_grpo_only_in_its_critic_and_the_kl_in_the_reward(folders):
    paper = "size=7b,data=.,reader=assets/miniwiki-reader"
    settings, grpo = (
        TrainSettings.from_config(config(paper, name)) for name in ("rsearch_ppo", "rsearch_grpo")
    )
    critic, objective = settings.train.critic, settings.train.objective
    assert (critic.optim.lr, critic.discount, critic.gae_lambda, critic.optim.total_steps) == (
        1e-5,
        1,
        1,
        195,
    )
    assert (objective.kl_coef, objective.kl_estimator, objective.kl_in) == (0.001, "k1", "reward")
    assert objective.whiten and grpo.train.critic is None
    same = dataclasses.replace(settings.train, critic=None, objective=grpo.train.objective)
    assert same == grpo.train and settings.recipe == grpo.recipe


def test_group_relative_advantages_with_one_sample_are_refused(folders):
    single = config()
    single.objective.drop_spread, single.train.samples = None, 1
    with pytest.raises(UserError, match=r"recipe\.advantage='grpo' .*train\.samples=1"):
        TrainSettings.from_config(single)
    single.recipe.advantage = "reinforce_plus_plus"
    assert TrainSettings.from_config(single).train.samples == 1


def test_a_group_filter_with_one_sample_is_refused():
    single = made.config("tiresrag_grpo", "policy=p")
    single.recipe.advantage, single.train.samples, single.objective.drop_spread = (
        "reinforce_plus_plus",
        1,
        None,
    )
    with pytest.raises(UserError, match=r"recipe\.use_filter.*train\.samples=1"):
        TrainSettings.parse(single)
    single.recipe.use_filter = False
    assert TrainSettings.parse(single).train.samples == 1


def test_schedules_count_optimiser_steps(folders):
    changed = config("steps=20", "rsearch_ppo")
    changed.objective.epochs, changed.critic.minibatches, changed.critic.warmup_steps = 3, 2, 4
    train = TrainSettings.from_config(changed).train
    assert (train.optim.total_steps, train.critic.optim.total_steps) == (16 * 3, 20 * 2)
    changed.critic.gae_lambda = 2.0
    with pytest.raises(UserError, match=r"^critic\.gae_lambda=2.0 must lie in 0\.\.1"):
        TrainSettings.from_config(changed)
    changed.critic.gae_lambda, changed.critic_optim.lr = 1.0, -1.0
    with pytest.raises(UserError, match=r"^critic_optim\.lr=-1.0 must be at least 0"):
        TrainSettings.from_config(changed)


# Rewards 0 0 3 of one question and 1 2 6 of another, by hand: group means 1 and 3, squared distances 6 and 14; mean 2,
# squared distances 26, and 20 from the groups' means.
ADVANTAGES = {
    "grpo": [-1 / 3**0.5, -1 / 3**0.5, 2 / 3**0.5, -2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5],
    "grpo_population": [
        *(d / 2**0.5 for d in (-1, -1, 2)),
        *(d / (14 / 3) ** 0.5 for d in (-2, -1, 3)),
    ],
    "dr_grpo": [-1, -1, 2, -2, -1, 3],
    "rloo": [-1.5, -1.5, 3, -3, -1.5, 4.5],
    "reinforce_plus_plus": [d / (26 / 6) ** 0.5 for d in (-2, -2, 1, -1, 0, 4)],
    "reinforce_plus_plus_baseline": [d / (20 / 6) ** 0.5 for d in (-1, -1, 2, -2, -1, 3)],
    "reward": [0, 0, 3, 1, 2, 6],
}


@pytest.mark.parametrize("name", [None, *ESTIMATORS])
def test_a_config_selects_the_advantage_estimator(folders, name):
    changed = config()
    if name is not None:
        changed.recipe.advantage = name
    trajectories = many(6)
    for t, group, total in zip(trajectories, (4, 4, 4, 9, 9, 9), (0.0, 0.0, 3.0, 1.0, 2.0, 6.0), strict=True):
        t.group, t.rewards = group, {"total": total}
    found = TrainSettings.from_config(changed).recipe.advantages(trajectories)
    np.testing.assert_allclose(found, ADVANTAGES[name or "grpo"], rtol=1e-5, atol=1e-6)


def test_the_error_for_an_unknown_advantage_lists_the_estimators(folders):
    changed = config()
    changed.recipe.advantage = "gae"
    allowed = (
        "grpo, grpo_population, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, reward"
    )
    with pytest.raises(UserError, match=rf"^recipe\.advantage='gae' is unknown; choose one of {allowed}$"):
        TrainSettings.from_config(changed)


def test_an_advantage_that_a_critic_would_replace_is_refused(folders):
    changed = config("", "rsearch_ppo")
    changed.recipe.advantage = "rloo"
    with pytest.raises(UserError, match=r"^recipe\.advantage='rloo' has no effect .* leave it at 'grpo'"):
        TrainSettings.from_config(changed)


def test_the_default_drop_spread_ignores_differences_in_format_and_reader_reward_alone(folders):
    settings = TrainSettings.from_config(config())
    recipe, spread = settings.recipe, settings.train.objective.drop_spread
    assert spread == pytest.approx(recipe.answer_weight + recipe.evidence_weight + recipe.reader_weight)
    assert (recipe.environment.correction, settings.train.objective.clip_high) == ("", 0.28)


def test_the_automatic_drop_spread_follows_the_weight_of_the_recipes_total(folders):
    changed = config()
    changed.rewards.functions, changed.rewards.recipe_weight = (
        ("tests.recipes.user_recipe:short_answer",),
        0.5,
    )
    assert TrainSettings.from_config(changed).train.objective.drop_spread == pytest.approx(0.35)


def test_a_policy_without_a_recipe_card_gets_the_settings_of_the_paper(folders):
    settings = TrainSettings.from_config(config("policy=models/Qwen2.5-7B-Instruct"))
    optim, objective, rollout = settings.train.optim, settings.train.objective, settings.rollout
    assert (optim.lr, optim.warmup_ratio, optim.schedule, optim.frozen) == (1e-6, 0.95, "constant", ())
    assert (objective.kl_coef, objective.clip_high, objective.drop_spread) == (0.001, 0.2, None)
    assert (rollout.rows, rollout.context, rollout.prefill_tokens, objective.row_lengths[-1]) == (
        16,
        4096,
        1024,
        4096,
    )
    environment = settings.recipe.environment
    assert (environment.turn_tokens, environment.observation_tokens) == (256, 1000)
    assert "</search>" in settings.recipe.instruction


def test_a_policy_with_a_recipe_card_gets_the_tiny_settings_and_its_own_instruction(folders):
    folder = folders / "models" / "Qwen2.5-7B-Instruct"
    write_card(folder, make_card(RSearch(instruction="Search."), 1024, 2))
    shipped = TrainSettings.from_config(config())
    for arg, instruction in (("", "Search."), (",prompt=bare", ""), (",prompt=paper", RSearch().instruction)):
        settings = TrainSettings.from_config(config(f"policy={folder}{arg}"))
        assert settings.recipe.instruction == instruction
        assert (settings.train, settings.rollout) == (shipped.train, shipped.rollout)


@pytest.mark.parametrize("steps", [0, 3])
def test_the_argument_steps_sets_the_number_of_updates(steps):
    assert config(f"steps={steps}").train.steps == steps


def test_a_config_lists_every_field_with_its_default():
    filled = config()
    for name, kind in SECTIONS.items():
        own = {"optim", "objective", "critic", "guard"} if name == "train" else set(DERIVED)
        assert set(filled[name]) == {field.name for field in dataclasses.fields(kind)} - own
    assert (filled.train.checkpoint_every, filled.objective.minibatches, filled.optim.b1) == (20, 1, 0.9)
    ordinary = config("policy=models/Qwen2.5-7B-Instruct").objective
    given = ConfigDict({"clip_norm": None})
    fill_defaults(given, OptimConfig)
    assert filled.optim.adam_lr is ordinary.drop_spread is given.clip_norm is None
    for section, field in ((filled.optim, "clip_norm"), (ordinary, "drop_spread"), (given, "clip_norm")):
        assert section.get_type(field) is object  # accepts any literal, including None
    assert filled.recipe.use_evidence is True and filled.recipe.environment.search == "search"


def test_fields_left_out_of_a_config_get_their_defaults(folders):
    short = {name: dict(section) for name, section in config().to_dict().items() if isinstance(section, dict)}
    for name, kind in SECTIONS.items():
        for field in dataclasses.fields(kind):
            if field.default is not dataclasses.MISSING and short[name].get(field.name, ...) == field.default:
                del short[name][field.name]
    whole = config().to_dict()
    assert TrainSettings.from_config(whole | short) == TrainSettings.from_config(whole)


def test_only_the_default_run_has_a_reference_result(folders):
    name, em = TrainSettings.from_config(config()).reference
    assert "4,000 clean demonstrations" in name and em == 0.733
    for arg in ("steps=2", "control=permuted", "policy=assets/miniwiki-policy", "data=folder"):
        assert "reference" not in config(arg)


def test_an_unknown_section_is_refused(folders):
    wrong = config()
    wrong.roolout = ConfigDict({"rows": 3})
    with pytest.raises(UserError, match=r"config\.roolout is unknown; the fields of config are compute"):
        TrainSettings.from_config(wrong)


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("rollout", "rows", 0, r"^rollout\.rows=0 must be at least 1"),
        ("rollout", "context", -5, r"rollout\.context=-5"),
        ("rollout", "top_k", 0, r"rollout\.top_k=0"),
        ("rollout", "wake_threshold", 0, r"rollout\.wake_threshold=0"),
        ("rollout", "prefill_tokens", 0, r"rollout\.prefill_tokens=0"),
        ("rollout", "top_p", 0.0, r"rollout\.top_p=0\.0 must be above 0"),
        ("rollout", "top_p", 1.5, r"rollout\.top_p=1\.5 must be above 0"),
        ("rollout", "sample_top_k", -1, r"rollout\.sample_top_k=-1"),
        ("reader_rollout", "max_wait_steps", 0, r"^reader_rollout\.max_wait_steps=0"),
        ("objective", "clip_low", -0.1, r"^objective\.clip_low=-0\.1 must be at least 0"),
        ("objective", "clip_high", -0.1, r"objective\.clip_high"),
        ("objective", "kl_coef", float("nan"), r"objective\.kl_coef=nan"),
        ("objective", "aggregation", "sum", r"aggregation='sum' is unknown; choose one of token_mean"),
        ("objective", "row_lengths", (0, 1024), r"objective\.row_lengths"),
        ("data", "held_out", -1, r"^data\.held_out=-1"),
        ("data", "world_size", 0, r"data\.world_size=0"),
        ("data", "train_worlds", 0, r"data\.train_worlds=0"),
        ("data", "held_out_worlds", 0, r"data\.held_out_worlds=0"),
        ("data", "train_per_kind", 0, r"data\.train_per_kind=0"),
        ("data", "held_out_per_kind", 0, r"data\.held_out_per_kind=0"),
        (
            "data",
            "held_out_split",
            "eval",
            r"data\.held_out_split='eval' is unknown; choose one of dev, test",
        ),
        ("data", "kinds", ("two_hops",), r"data\.kinds=.*must be some of one_hop"),
        ("data", "kinds", (), r"data\.kinds"),
        ("data", "on_error", "ignore", r"data\.on_error='ignore' .*refuse, skip"),
        ("retriever", "kind", "foo", r"^retriever\.kind='foo' .*scann, bm25, exact, off"),
        ("retriever", "k1", -1.0, r"retriever\.k1=-1"),
        ("retriever", "b", 1.5, r"retriever\.b=1\.5"),
        ("retriever", "title_weight", -1, r"retriever\.title_weight=-1"),
        ("rollout", "slots", 3, r"rollout\.slots is unknown; the fields of rollout are"),
        ("objective", "microbatch_tokens", 0, r"objective\.microbatch_tokens=0"),
        ("objective", "row_lengths", (64,), r"rollout\.context"),
        ("train", "questions", 0, r"train\.questions=0"),
        ("recipe", "gamma", 1.0, r"recipe\.gamma is not a field of rsearch"),
        ("recipe", "name", "r4", r"recipe\.name='r4' is unknown; choose one of .*rsearch"),
        ("data", "path", "nowhere", "nowhere"),
        ("retriever", "encoder", "nowhere", r"^retriever\.encoder='nowhere' is no Hugging Face folder"),
        ("objective", "drop_spread", "x", r"^objective\.drop_spread='x' must be a number, None, or auto"),
        ("objective", "drop_spread", True, r"^objective\.drop_spread=True must be float or None"),
        (
            "objective",
            "row_lengths",
            (384, "x"),
            r"^objective\.row_lengths=\(384, 'x'\) must be a tuple.* int",
        ),
        ("optim", "frozen", ("[",), r"^optim\.frozen=\('\[',\): '\[' is not a regular expression"),
        ("data", "held_out_split", "train", r"^data\.held_out_split='train' .*dev, test"),
        ("data", "path", "", r"^data='' is not a folder"),
        ("retriever", "index", "nowhere", r"^retriever\.index='nowhere': .*build_index\.py"),
        ("train", "seed", 2**32, r"^train\.seed=4294967296 must be at most 4294967295"),
        ("recipe", "reader_weight", -1.0, r"^recipe\.reader_weight=-1\.0 must be at least 0"),
    ],
)
def test_the_error_for_a_wrong_field_names_it(folders, section, field, value, message):
    wrong = config()
    wrong[section].unlock()
    wrong[section][field] = value
    with pytest.raises(UserError, match=message):
        TrainSettings.from_config(wrong)


def test_the_error_for_a_wrong_field_of_the_environment_names_its_section(folders):
    wrong = config()
    wrong.recipe.environment.max_searches = -1
    with pytest.raises(UserError, match=r"^recipe\.environment\.max_searches=-1 must be at least 0"):
        TrainSettings.from_config(wrong)


@pytest.mark.parametrize("field", ["policy", "name"])
def test_an_empty_policy_or_name_is_refused(folders, field):
    wrong = config()
    wrong[field] = ""
    with pytest.raises(UserError, match=f"^{field}=''"):
        TrainSettings.from_config(wrong)


def test_the_error_for_a_missing_policy_names_it_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = config("policy=assets/no-policy")
    with pytest.raises(UserError, match=r"policy='assets/no-policy'.*config\.json"):
        TrainSettings.from_config(missing)
    assert list(tmp_path.iterdir()) == []


def test_different_arguments_give_different_run_names():
    names = [config(arg).name for arg in ("", "steps=2", "data=some/folder")]
    assert names == ["rsearch_grpo_tiny", "rsearch_grpo_tiny-steps=2", "rsearch_grpo_tiny-data=some-folder"]


@pytest.mark.parametrize("arg", ["size=70b", "sizes=3b", "steps=many"])
def test_the_error_for_a_wrong_argument_names_it(arg):
    with pytest.raises(UserError, match=arg.split("=")[0]):
        config(arg)


@pytest.mark.parametrize(
    "name", ["rsearch_grpo", "rsearch_ppo", "tiresrag_grpo", "r3rag_ppo", "r2ag", "search_r1"]
)
def test_configs_for_the_built_in_world_compile_one_update_program(name):
    assert len(made.config(name).objective.row_lengths) == 1


def test_a_smoke_run_has_one_row_length_and_a_longer_run_several(tmp_path):
    made.save_random_policy(tmp_path / "policy")
    for steps, lengths in ((2, 1), (6, 3)):
        arg = f"steps={steps},policy={tmp_path / 'policy'}"
        config = made.config("rsearch_grpo", arg)
        assert len(config.objective.row_lengths) == lengths
        assert ("smoke run (steps=2" in config.get("note", "")) == (steps == 2)


def test_the_note_of_a_smoke_run_has_the_numbers_of_the_run_itself():
    config = made.config("rsearch_grpo", "steps=2")
    assert "16 questions per update, 8 held-out questions of each kind" in config.note
    config.train.questions = 4
    assert "4 questions per update, 8 held-out questions of each kind" in config.note


def test_the_note_of_a_smoke_run_over_a_folder_says_nothing_of_the_built_in_world():
    note = made.config("rsearch_grpo", "steps=2,data=folder").note
    assert "16 questions per update, rows of one length" in note and "of each kind" not in note
