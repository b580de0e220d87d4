"""The recipes by the name a config gives them."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from rrl.errors import UserError
from rrl.recipes.base import Recipe
from rrl.recipes.r1_searcher import R1Searcher
from rrl.recipes.r2ag import R2AG
from rrl.recipes.r3rag import R3Rag
from rrl.recipes.research import ReSearch
from rrl.recipes.rsearch import RSearch
from rrl.recipes.search_r1 import SearchR1
from rrl.recipes.tiresrag import TiresRag

RECIPES: Mapping[str, Callable[..., Any]] = {
    "r2ag": R2AG,
    "r3rag": R3Rag,
    "rsearch": RSearch,
    "tiresrag": TiresRag,
    "search_r1": SearchR1,
    "r1_searcher": R1Searcher,
    "research": ReSearch,
}


def is_recipe(name: str) -> bool:
    """Whether a name is one of `RECIPES`, or MODULE:CLASS, a recipe of one's own."""
    return name in RECIPES or ":" in name


def recipe_class(name: str) -> Callable[..., Any]:
    """The recipe of a name. `MODULE:CLASS` is imported: a dataclass with all that `rrl.recipes.base.Recipe` asks for.

    Raises UserError for an unknown name, and for a module or class that cannot be imported.
    """
    if name in RECIPES:
        return RECIPES[name]
    module, colon, kind = name.partition(":")
    if not colon:
        raise UserError(
            f"recipe.name={name!r} is unknown; there are {', '.join(RECIPES)}, and MODULE:CLASS for one of your own"
        )
    try:
        found: Any = getattr(importlib.import_module(module), kind)
    except (ImportError, ValueError, AttributeError) as error:
        raise UserError(
            f"recipe.name={name!r} cannot be imported ({error}); is its folder on PYTHONPATH?"
        ) from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise UserError(
            f"recipe.name={name!r} is no dataclass; see rrl.recipes.base.Recipe for what a recipe is"
        )
    return found


def recipe_name(recipe: Recipe) -> str:
    """The name under which `make_recipe` makes a recipe of this class."""
    kind = type(recipe)
    return next(
        (name for name, known in RECIPES.items() if known is kind), f"{kind.__module__}:{kind.__qualname__}"
    )


def make_recipe(
    name: str, fields: Mapping[str, Any] | None = None, environment: Mapping[str, Any] | None = None
) -> Recipe:
    """A recipe with some of its fields, and some of its environment's, replaced.

    Raises UserError for an unknown recipe or field, with what there is.
    """
    recipe = recipe_class(name)()
    known = {field.name for field in dataclasses.fields(recipe)}
    for field in fields or {}:
        if field not in known:
            raise UserError(
                f"recipe.{field} is no field of {name}; its fields are {', '.join(sorted(known))}"
            )
    try:
        recipe = dataclasses.replace(recipe, **dict(fields or {}))
        inner = {field.name for field in dataclasses.fields(recipe.environment)}
        for field in environment or {}:
            if field not in inner:
                raise UserError(f"environment.{field} is unknown; there are {', '.join(sorted(inner))}")
        changed = dataclasses.replace(recipe.environment, **dict(environment or {}))
        return dataclasses.replace(recipe, environment=changed)
    except UserError as error:
        raise UserError(f"recipe.{error}") from error
