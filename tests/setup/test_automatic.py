"""Config fields on the scale of the reward: "auto" gives the values of earlier runs, and follows the weight of the recipe."""

import pytest

from rrl.errors import UserError
from rrl.recipes.catalogue import RECIPES, make_recipe
from rrl.setup.automatic import resolve_automatic
from rrl.setup.settings import TrainSettings, with_defaults
from tests.train.made import config

SHORT = "tests.recipes.user_recipe:short_answer"


def parsed(name, arg="", **sections):
    """The settings of a shipped config, with some fields of its sections changed."""
    filled = config(name, arg)
    for section, fields in sections.items():
        filled[section].update(fields)
    return TrainSettings.parse(filled).train


def weighted(weight):
    return {"functions": (SHORT,), "recipe_weight": weight}


@pytest.mark.parametrize(
    ("name", "arg", "reward"),
    [
        ("rsearch_grpo", "", 0.0),
        ("rsearch_ppo", "", 0.0),
        ("search_r1", "", 0.0),
        ("research_grpo", "", 0.0),
        ("r2ag", "", 0.0),
        ("r3rag_ppo", "policy=assets/miniwiki-policy", 0.0),
        ("tiresrag_grpo", "", 0.0),
        ("r1_searcher", "stage=1", 0.0),
        ("r1_searcher", "", -0.5),
        ("r1_searcher", "size=7b,data=FOLDER,encoder=FOLDER", -2.0),
    ],
)
def test_the_shipped_configs_have_the_values_of_earlier_runs(name, arg, reward):
    # Earlier versions stored these numbers, so their workdirs and reproductions continue.
    train = parsed(name, arg)
    assert train.guard.reward == reward
    assert train.critic is None or train.critic.clip == 0.5


def test_the_threshold_of_the_guard_follows_the_reward():
    assert parsed("r1_searcher", recipe={"malformed_penalty": 3.0}).guard.reward == -3.0
    assert parsed("r1_searcher", rewards=weighted(0.5)).guard.reward == -0.25
    assert (
        parsed("r1_searcher", rewards=weighted(0.0)).guard.reward is None
    )  # the functions' range is unknown


def test_value_clipping_follows_the_weight_of_the_recipe():
    clips = [parsed("rsearch_ppo", rewards=weighted(weight)).critic.clip for weight in (1.0, 4.0, 0.0)]
    assert clips == [0.5, 2.0, 0.5]


@pytest.mark.parametrize("value", [0.3, -1, None])
def test_a_given_value_replaces_the_automatic_one(value):
    filled = config("rsearch_ppo")
    assert filled.guard.reward == filled.critic.clip == "auto"
    assert all(
        filled[section].get_type(name) is object
        for section, name in (("guard", "reward"), ("critic", "clip"))
    )
    assert parsed("rsearch_ppo", guard={"reward": value}, rewards=weighted(2.0)).guard.reward == value
    if value != -1:
        assert parsed("rsearch_ppo", critic={"clip": value}, rewards=weighted(2.0)).critic.clip == value


@pytest.mark.parametrize("field", ["objective.drop_spread", "guard.reward", "critic.clip"])
def test_another_string_is_refused(field):
    section, name = field.split(".")
    with pytest.raises(UserError, match=rf"^{field}='none' must be a number, None, or auto$"):
        parsed("rsearch_ppo", **{section: {name: "none"}})
    with pytest.raises(UserError, match=r"^rewards\.recipe_weight=-1\.0 must be at least 0"):
        parsed("rsearch_ppo", rewards=weighted(-1.0))


@pytest.mark.parametrize("name", RECIPES)
def test_a_config_without_the_fields_gets_their_defaults(name):
    recipe = make_recipe(name)
    resolved = resolve_automatic({"objective": {}, "guard": {}, "critic": {}}, recipe)
    assert resolved == {
        "objective": {"drop_spread": None},
        "guard": {"reward": recipe.collapsed_reward},
        "critic": {"clip": 0.5},
    }


@pytest.mark.parametrize("present", ["critic", "critic_optim"])
def test_a_config_without_a_section_gets_its_automatic_values(present):
    filled = config("r1_searcher", "")
    del filled["guard"]
    assert TrainSettings.parse(with_defaults(filled)).train.guard.reward == -0.5
    filled = config("rsearch_ppo", "")
    if present == "critic":
        del filled["critic_optim"], filled.critic["clip"]
    else:
        del filled["critic"]
    filled.rewards.update(weighted(4.0))
    assert TrainSettings.parse(with_defaults(filled)).train.critic.clip == 2.0
