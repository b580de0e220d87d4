"""Recipes by name: those of the papers, and one's own."""

import pytest

from rrl.errors import UserError
from rrl.eval.methods import make_answering_method
from rrl.recipes.card import RecipeCard, make_card
from rrl.recipes.catalogue import RECIPES, is_recipe, make_recipe, recipe_name
from tests.recipes.own import Brief

OWN = "tests.recipes.own:Brief"


@pytest.mark.parametrize("name", [*RECIPES, OWN])
def test_a_recipe_is_made_by_the_name_it_has(name):
    assert is_recipe(name) and recipe_name(make_recipe(name)) == name


def test_a_recipe_of_ones_own_takes_fields_and_comes_back_from_its_card():
    recipe = make_recipe(OWN, {"bonus": 0.5}, {"max_searches": 2})
    assert isinstance(recipe, Brief) and recipe.bonus == 0.5
    card = make_card(recipe, 1024, 3)
    assert card.recipe == OWN and card.make() == recipe


def test_an_evaluation_finds_it_too():
    way = make_answering_method({"name": OWN}, {"bonus": 0.5}, None)
    assert way.recipe == make_recipe(OWN, {"bonus": 0.5})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none", "recipe.name='none' is unknown; there are r2ag"),
        ("no_such_module:Brief", "cannot be imported .*PYTHONPATH"),
        ("tests.recipes.own:Absent", "cannot be imported"),
        ("tests.recipes.own:dataclasses", "is no dataclass"),
    ],
)
def test_a_name_of_nothing_is_refused(name, words):
    with pytest.raises(UserError, match=words):
        make_recipe(name)


def test_a_card_imports_nothing_until_its_recipe_is_asked_for():
    assert RecipeCard("no_such_module:Brief").recipe == "no_such_module:Brief"
