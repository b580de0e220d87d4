"""The recipe card: a file in a policy's folder that holds its recipe, so that the policy can be used without its config."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from rrl.config.renamed import rename_stored
from rrl.errors import UserError
from rrl.files import shipped, write_atomically
from rrl.models.weights import require_folder
from rrl.recipes.base import Recipe
from rrl.recipes.catalogue import RECIPES, make_recipe, recipe_name

FILE = "rrl_recipe.json"

_COLD_START = re.compile(r"(?P<workdir>runs/(?P<recipe>\w+)_cold_start)/model")
"""Matches the default path of a cold-started policy in the configs of the built-in world (`rrl.miniwiki`)."""


@dataclasses.dataclass(frozen=True)
class RecipeCard:
    """The content of `rrl_recipe.json` in a policy's folder."""

    recipe: str
    """Name in the catalogue, or MODULE:CLASS. The folder may come from an untrusted source, so a caller must not `make` a
    MODULE:CLASS unless the user gives the same name."""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The recipe's fields that differ from its defaults."""
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The environment's fields that differ from its defaults."""
    context: int = 0
    """Maximum number of tokens of a trajectory in training; 0: unknown."""
    top_k: int = 3
    """Passages per search in training."""

    def __post_init__(self) -> None:
        for name, expected in (
            ("recipe", str),
            ("fields", Mapping),
            ("environment", Mapping),
            ("context", int),
            ("top_k", int),
        ):
            if not isinstance(getattr(self, name), expected):
                raise TypeError(f"{name}={getattr(self, name)!r} must be a {expected.__name__}")

    def make(self) -> Recipe:
        """Return the recipe. Imports a MODULE:CLASS without a check (see `recipe`)."""
        return make_recipe(self.recipe, self.fields, self.environment)


def make_card(recipe: Recipe, context: int, top_k: int) -> RecipeCard:
    """Return the card of a recipe."""
    return RecipeCard(
        recipe_name(recipe),
        _non_default_fields(recipe),
        _non_default_fields(recipe.environment),
        context,
        top_k,
    )


def require_policy(folder: str | pathlib.Path, field: str = "policy") -> None:
    """Raise UserError if `folder` is not a model folder.

    Args:
      folder: the policy's folder. If it is a cold start that does not exist yet, the message names the command that makes it.
      field: the config field or flag that the message names.
    """
    try:
        require_folder(field, folder)
    except UserError as error:
        match = _COLD_START.fullmatch(str(folder))
        if match is None or match["recipe"] not in RECIPES:
            raise
        raise UserError(
            f"{field}={str(folder)!r} does not exist yet. Make it by python launch/sft.py "
            f"--config=configs/miniwiki_cold_start.py:recipe={match['recipe']},init=assets/miniwiki-policy "
            f"--workdir={match['workdir']}, or give {field}=FOLDER"
        ) from error


def write_card(folder: str | pathlib.Path, card: RecipeCard) -> None:
    """Write the card into a policy's folder."""
    text = json.dumps(dataclasses.asdict(card), indent=2, ensure_ascii=False)
    write_atomically(pathlib.Path(folder, FILE), text + "\n")


def read_card(folder: str | pathlib.Path) -> RecipeCard | None:
    """Return the card of a policy's folder, or None if it has none. Raises UserError if the card cannot be read."""
    file = shipped(folder) / FILE  # a folder that comes with rrl is found from every working directory
    if not file.is_file():
        return None
    try:
        # An older card may hold former names of fields.
        card = RecipeCard(**json.loads(file.read_text(encoding="utf-8")))
        fields = rename_stored(card.fields, "recipe")
        return dataclasses.replace(
            card, fields=fields, environment=rename_stored(card.environment, "recipe.environment")
        )
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{file}: not a recipe card ({error}); write it again with write_card, or remove it"
        ) from error


def _non_default_fields(value: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults, without a nested environment."""
    changed = {}
    for field in dataclasses.fields(value):
        current = getattr(value, field.name)
        if not dataclasses.is_dataclass(current) and current != field.default:
            changed[field.name] = current
    return changed
