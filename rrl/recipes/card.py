"""The recipe a policy was trained with, kept beside its weights, so that it can be used without its config."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from rrl.config.renamed import rename_stored
from rrl.errors import UserError
from rrl.files import write_atomically
from rrl.models.weights import require_folder
from rrl.recipes.base import Recipe
from rrl.recipes.catalogue import RECIPES, make_recipe, recipe_name

FILE = "rrl_recipe.json"

_COLD_START = re.compile(rf"(?P<workdir>runs/(?P<recipe>{'|'.join(RECIPES)})_cold_start)/model")
"""Where the configs of the built-in world look for their start."""


@dataclasses.dataclass(frozen=True)
class RecipeCard:
    """What `rrl_recipe.json` in a policy's folder holds."""

    recipe: str
    """Name in the catalogue, or MODULE:CLASS. It is imported only where the same name is asked for: a folder may come from
    anywhere."""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The recipe's fields that differ from its defaults."""
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Likewise of its environment."""
    context: int = 0
    """Most tokens of a trajectory in training; 0: not known."""
    top_k: int = 3
    """Passages a search returned."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("recipe", str),
            ("fields", Mapping),
            ("environment", Mapping),
            ("context", int),
            ("top_k", int),
        ):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name}={getattr(self, name)!r} is no {kind.__name__}")

    def make(self) -> Recipe:
        """The recipe itself."""
        return make_recipe(self.recipe, self.fields, self.environment)


def make_card(recipe: Any, context: int, top_k: int) -> RecipeCard:
    """The card of a recipe."""
    return RecipeCard(recipe_name(recipe), _changed(recipe), _changed(recipe.environment), context, top_k)


def require_policy(folder: str | pathlib.Path, field: str = "policy") -> None:
    """Raises UserError for a policy (of this field) that is no model folder; of a cold start that has not been made yet, it says
    how to."""
    try:
        require_folder(field, folder)
    except UserError as error:
        made = _COLD_START.fullmatch(str(folder))
        if made is None:
            raise
        raise UserError(
            f"{field}={str(folder)!r} is not there yet. Make it by python launch/sft.py --config=configs/miniwiki_cold_start.py:"
            f"recipe={made['recipe']},init=assets/miniwiki-policy --workdir={made['workdir']}, or give {field}=FOLDER"
        ) from error


def write_card(folder: str | pathlib.Path, card: RecipeCard) -> None:
    """Writes the card into a policy's folder."""
    text = json.dumps(dataclasses.asdict(card), indent=2, ensure_ascii=False)
    write_atomically(pathlib.Path(folder, FILE), text + "\n")


def read_card(folder: str | pathlib.Path) -> RecipeCard | None:
    """The card of a policy's folder, or None where there is none. Raises UserError for one that cannot be read."""
    file = pathlib.Path(folder, FILE)
    if not file.is_file():
        return None
    try:
        card = RecipeCard(**json.loads(file.read_text(encoding="utf-8")))
        fields = rename_stored(card.fields, "recipe")
        return dataclasses.replace(
            card, fields=fields, environment=rename_stored(card.environment, "recipe.environment")
        )
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{file}: not a recipe card ({error}); write it again with write_card, or remove it"
        ) from error


def _changed(value: Any) -> dict[str, Any]:
    """Fields that differ from their defaults; nested environments are told apart by themselves."""
    changed = {}
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        if not dataclasses.is_dataclass(found) and found != field.default:
            changed[field.name] = found
    return changed
