"""Configs are checked before anything is loaded: every wrong field is named, with what is allowed."""

import importlib.util
import pathlib

import pytest

from rrl.errors import UserError
from rrl.train.experiment import Settings

ROOT = pathlib.Path(__file__).parents[2]


def config(arg: str = ""):
    spec = importlib.util.spec_from_file_location("rsearch_grpo", ROOT / "configs" / "rsearch_grpo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(arg)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders that look like models, where the configs expect them."""
    monkeypatch.chdir(tmp_path)
    for name in ("assets/miniwiki-policy", "assets/miniwiki-reader", "models/Qwen2.5-7B-Instruct"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


def test_the_default_is_the_built_in_world_with_the_shipped_policy(folders):
    settings = Settings.of(config())
    assert settings.data.path == "miniwiki"
    assert settings.policy == "assets/miniwiki-policy"
    assert settings.retriever.kind == "scann"
    assert settings.recipe.prompt(type("Q", (), {"text": "Who?"})) == "Who?"


def test_the_large_sizes_hold_the_papers_settings(folders):
    settings = Settings.of(config("size=7b,data=.,reader=assets/miniwiki-reader"))
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


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("rollout", "slots", 3, r"rollout\.slots is unknown; the fields of rollout are"),
        ("objective", "microbatch_tokens", 0, r"objective\.microbatch_tokens=0"),
        ("objective", "lengths", (64,), r"rollout\.context"),
        ("train", "questions", 0, r"train\.questions=0"),
        ("recipe", "gamma", 1.0, r"recipe\.gamma is no field of rsearch"),
        ("recipe", "name", "r4", r"recipe\.name='r4' is unknown; there are rsearch"),
        ("data", "path", "nowhere", "nowhere"),
    ],
)
def test_a_wrong_field_is_named(folders, section, field, value, message):
    wrong = config()
    wrong[section].unlock()
    wrong[section][field] = value
    with pytest.raises(UserError, match=message):
        Settings.of(wrong)


def test_a_missing_policy_is_named_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"policy='assets/miniwiki-policy'.*config\.json"):
        Settings.of(config())
    assert list(tmp_path.iterdir()) == []


def test_each_argument_has_a_workdir_of_its_own():
    names = [config(arg).name for arg in ("", "steps=2", "data=some/folder")]
    assert names == ["rsearch_grpo_tiny", "rsearch_grpo_tiny-steps=2", "rsearch_grpo_tiny-data=some-folder"]


@pytest.mark.parametrize("arg", ["size=70b", "sizes=3b", "steps=many"])
def test_a_wrong_argument_is_named(arg):
    with pytest.raises(UserError, match=arg.split("=")[0]):
        config(arg)
