"""The recipes by name, and recipes of users by MODULE:CLASS. A recipe registers itself where it is defined (`register`)."""

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

import rrl.recipes
from rrl.config.sections import fill_defaults
from rrl.errors import UserError
from rrl.recipes.base import REGISTERED, Recipe

RECIPES: dict[str, type[Recipe]] = {}
"""Name -> class of each recipe in this package. Filled below, from all modules of the package that may define one."""


def is_recipe(name: str) -> bool:
    """Return whether `name` is in `RECIPES` or has the form MODULE:CLASS."""
    return name in RECIPES or ":" in name


def recipe_class(name: str) -> type[Recipe]:
    """Return the recipe class of a name; MODULE:CLASS is imported and must be a subclass of `Recipe`.

    Raises UserError for an unknown name, for a failed import, and for a class that is not a complete recipe.
    """
    if name in RECIPES:
        return RECIPES[name]
    module, colon, class_name = name.partition(":")
    if not colon:
        raise UserError(
            f"recipe.name={name!r} is unknown; choose one of {', '.join(RECIPES)}, or MODULE:CLASS for your own"
        )
    try:
        imported: Any = getattr(importlib.import_module(module), class_name)
    except (ImportError, ValueError, AttributeError) as error:
        raise UserError(
            f"recipe.name={name!r} cannot be imported ({error}); is its folder on PYTHONPATH?"
        ) from error
    if not (isinstance(imported, type) and issubclass(imported, Recipe)):
        raise UserError(
            f"recipe.name={name!r} must be a frozen dataclass that extends rrl.recipes.base.Recipe"
        )
    if inspect.isabstract(imported):
        missing = ", ".join(sorted(imported.__abstractmethods__))
        raise UserError(f"recipe.name={name!r} must define {missing}; see docs/your_own_recipe.md")
    return imported


def recipe_name(recipe: Recipe) -> str:
    """Return the name from which `make_recipe` makes a recipe of this class."""
    cls = type(recipe)
    return next(
        (name for name, known in RECIPES.items() if known is cls), f"{cls.__module__}:{cls.__qualname__}"
    )


def make_recipe(
    name: str, fields: Mapping[str, Any] | None = None, environment: Mapping[str, Any] | None = None
) -> Recipe:
    """Return a recipe with changed fields.

    Args:
      name: a name in `RECIPES`, or MODULE:CLASS.
      fields: fields of the recipe to replace.
      environment: fields of its environment to replace.

    Raises UserError for an unknown recipe or field, and names the known ones.
    """
    recipe: Any = recipe_class(name)()
    known = {field.name for field in dataclasses.fields(recipe)}
    for field in fields or {}:
        if field not in known:
            raise UserError(
                f"recipe.{field} is not a field of {name}; its fields are {', '.join(sorted(known))}"
            )
    try:
        recipe = dataclasses.replace(recipe, **dict(fields or {}))
        known_environment = {field.name for field in dataclasses.fields(recipe.environment)}
        for field in environment or {}:
            if field not in known_environment:
                raise UserError(
                    f"environment.{field} is unknown; its fields are {', '.join(sorted(known_environment))}"
                )
        changed = dataclasses.replace(recipe.environment, **dict(environment or {}))
        return dataclasses.replace(recipe, environment=changed)
    except UserError as error:
        raise UserError(f"recipe.{error}") from error


def fill_recipe_defaults(name: str, fields: ConfigDict, environment: ConfigDict) -> None:
    """Add to the config sections of a recipe and of its environment, in place, every missing field with its default.

    Args:
      name: a name in `RECIPES`, or MODULE:CLASS.
      fields: section of the recipe.
      environment: section of its environment.

    Raises UserError for an unknown recipe.
    """
    recipe = make_recipe(name)
    fill_defaults(fields, type(recipe))
    fill_defaults(environment, type(recipe.environment))


for _module in pkgutil.iter_modules(rrl.recipes.__path__):
    if not _module.ispkg and _module.name not in ("base", "card", "catalogue", "episodes", "scoring"):
        importlib.import_module(f"rrl.recipes.{_module.name}")
RECIPES.update(sorted(REGISTERED.items()))
