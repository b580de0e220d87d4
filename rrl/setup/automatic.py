"""Config fields in units of the total reward. Each may be "auto": its value is then computed from the recipe and its weight.

A recipe declares its scale (`Recipe.reward_range`, `Recipe.collapsed_reward`, `Recipe.uninformative_spread`), and
`rewards.recipe_weight` multiplies it. Read `resolve_automatic` first.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from rrl.config.sections import build
from rrl.errors import UserError
from rrl.recipes.base import Recipe
from rrl.rewards.functions import RewardConfig

AUTO = "auto"
VALUE_CLIP = 0.5
"""Value clipping of R-Search's PPO, whose answer earns up to 1 (`rrl.rl.critic.CriticConfig.clip`)."""


def drop_spread(recipe: Recipe, recipe_weight: float) -> float:
    """Return `objective.drop_spread`: the recipe's own value, times its weight."""
    return recipe_weight * recipe.uninformative_spread


def guard_reward(recipe: Recipe, recipe_weight: float) -> float | None:
    """Return `guard.reward`: the recipe's own value, times its weight.

    None if the weight is 0: then only the user's reward functions count, and their range is unknown.
    """
    return recipe_weight * recipe.collapsed_reward if recipe_weight else None


def critic_clip(_: Recipe, recipe_weight: float) -> float:
    """Return `critic.clip`: VALUE_CLIP times the recipe's weight.

    VALUE_CLIP itself if the weight is 0: then only the user's reward functions count, and their scale is unknown.
    """
    return VALUE_CLIP * (recipe_weight or 1.0)


@dataclasses.dataclass(frozen=True)
class AutomaticField:
    """A config field that may be "auto"."""

    section: str
    name: str
    default: float | str | None
    """Its value in a config that does not list it."""
    value: Callable[[Recipe, float], float | None]
    """(recipe, `rewards.recipe_weight`) -> the value that "auto" stands for."""


AUTOMATIC_FIELDS = (
    AutomaticField("objective", "drop_spread", None, drop_spread),
    AutomaticField("guard", "reward", AUTO, guard_reward),
    AutomaticField("critic", "clip", AUTO, critic_clip),
)


def add_automatic_defaults(config: ConfigDict) -> None:
    """Add missing automatic fields with their defaults to a config, in place. A section that is missing is not added."""
    for field in AUTOMATIC_FIELDS:
        if field.section in config and field.name not in config[field.section]:
            config[field.section][field.name] = field.default


def resolve_automatic(values: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return a config in which every automatic field holds a number or None.

    Args:
      values: the sections of a training config.
      recipe: its recipe.

    Raises:
      UserError: such a field is another string than "auto", or the section `rewards` is wrong.
    """
    resolved = dict(values)
    recipe_weight = build(RewardConfig, values.get("rewards", {}), "rewards").recipe_weight
    for field in AUTOMATIC_FIELDS:
        if field.section not in values:
            continue
        section = dict(resolved[field.section])
        given = section.setdefault(field.name, field.default)
        if given == AUTO:
            section[field.name] = field.value(recipe, recipe_weight)
        elif isinstance(given, str):
            raise UserError(f"{field.section}.{field.name}={given!r} must be a number, None, or {AUTO}")
        resolved[field.section] = section
    return resolved
