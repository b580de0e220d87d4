"""Recipes by name: those of the papers, and recipes of users."""

import pytest
from ml_collections import ConfigDict

from rrl.errors import UserError
from rrl.eval.methods import make_answering_method
from rrl.recipes.base import register
from rrl.recipes.card import RecipeCard, make_card
from rrl.recipes.catalogue import RECIPES, fill_recipe_defaults, is_recipe, make_recipe, recipe_name
from rrl.recipes.rsearch import RSearch
from tests.recipes.user_recipe import Brief

OWN = "tests.recipes.user_recipe:Brief"


@pytest.mark.parametrize("name", [*RECIPES, OWN])
def test_recipe_name_is_the_name_that_makes_the_recipe(name):
    assert is_recipe(name) and recipe_name(make_recipe(name)) == name


def test_a_user_recipe_takes_fields_and_is_restored_from_its_card():
    recipe = make_recipe(OWN, {"bonus": 0.5}, {"max_searches": 2})
    assert isinstance(recipe, Brief) and recipe.bonus == 0.5
    card = make_card(recipe, 1024, 3)
    assert card.recipe == OWN and card.make() == recipe


def test_an_evaluation_accepts_a_user_recipe():
    method = make_answering_method({"name": OWN}, {"bonus": 0.5}, None)
    assert method.recipe == make_recipe(OWN, {"bonus": 0.5})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "none",
            "recipe.name='none' is unknown; choose one of r1_searcher, r2ag, r3rag, research, rsearch, search_r1, tiresrag",
        ),
        ("no_such_module:Brief", "cannot be imported .*PYTHONPATH"),
        ("tests.recipes.user_recipe:Absent", "cannot be imported"),
        ("tests.recipes.user_recipe:Incomplete", "must define prompt, score, tags"),
        (
            "tests.recipes.user_recipe:dataclasses",
            "must be a frozen dataclass that extends rrl.recipes.base.Recipe",
        ),
    ],
)
def test_unknown_names_and_failed_imports_raise_user_errors(name, words):
    with pytest.raises(UserError, match=words):
        make_recipe(name)


def test_a_recipe_registers_itself_and_a_name_can_be_taken_only_once():
    assert RECIPES["rsearch"] is RSearch and list(RECIPES) == sorted(RECIPES)
    with pytest.raises(ValueError, match=r"'rsearch' is registered already, by rrl\.recipes\.rsearch"):
        register("rsearch")(Brief)


def test_making_a_card_imports_nothing():
    assert RecipeCard("no_such_module:Brief").recipe == "no_such_module:Brief"


def test_recipe_and_environment_get_their_own_defaults_and_keep_given_fields():
    fields, environment = ConfigDict({"name": OWN, "bonus": 0.5}), ConfigDict({"max_searches": 2})
    fill_recipe_defaults(OWN, fields, environment)
    assert fields.bonus == 0.5 and environment.max_searches == 2
    assert environment.turn_tokens == Brief().environment.turn_tokens and "turn_tokens" not in fields
