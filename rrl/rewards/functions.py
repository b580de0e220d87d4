"""Rewards that users write: plain functions `(trajectory, question) -> float`, named in a config as MODULE:FUNCTION."""

import dataclasses
import importlib
import inspect
import math
import numbers
from collections.abc import Callable, Sequence

from rrl.data.questions import Question
from rrl.data.trajectory import Trajectory
from rrl.errors import UserError, at_least, describe_error

RewardFunction = Callable[[Trajectory, Question], float]
"""Maps a trajectory and its question to a reward. The recipe has already set the trajectory's `answer`, `metrics` and
`rewards`."""


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Reward functions beside the recipe's own rewards (the section `rewards` of a training config)."""

    functions: tuple[str, ...] = ()
    """Reward functions as MODULE:FUNCTION. Each becomes a reward component with the function's name."""
    weights: tuple[float, ...] = ()
    """One weight per function, which may be negative; (): all 1."""
    recipe_weight: float = 1.0
    """Weight of the recipe's own total. 0: only the functions count."""

    def __post_init__(self) -> None:
        at_least(0, self, "recipe_weight")
        if self.weights and len(self.weights) != len(self.functions):
            raise UserError(
                f"weights={self.weights} must have one number per function, of which there are {len(self.functions)}; or (), "
                "which weights each by 1"
            )
        if not all(math.isfinite(weight) for weight in (*self.weights, self.recipe_weight)):
            raise UserError(f"weights={self.weights}, recipe_weight={self.recipe_weight}: all must be finite")
        if self.recipe_weight != 1 and not self.functions:
            raise UserError(
                f"recipe_weight={self.recipe_weight} has no effect without functions; name one, or leave it at 1"
            )

    def load(self) -> "RewardFunctions":
        """Import the functions. Raises UserError if one cannot be imported or called, or if two have one name."""
        functions: dict[str, RewardFunction] = {}
        for path in self.functions:
            function = load_function(path)
            name = path.partition(":")[2]
            if name in (*functions, "total"):
                raise UserError(
                    f"rewards.functions: the name {name!r} of {path} is taken; rename the function"
                )
            functions[name] = function
        weights = self.weights or (1.0,) * len(functions)
        return RewardFunctions(functions, dict(zip(functions, weights, strict=True)), self.recipe_weight)


def load_function(path: str) -> RewardFunction:
    """Return the function that MODULE:FUNCTION names.

    Raises UserError if it cannot be imported, or does not take (trajectory, question).
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module raises
        raise UserError(
            f"rewards.functions: {path!r} cannot be imported ({error}); write MODULE:FUNCTION, with its folder on PYTHONPATH"
        ) from error
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"rewards.functions: {path!r} must be a function of (trajectory, question): {error}"
        ) from error
    return function


@dataclasses.dataclass(frozen=True)
class RewardFunctions:
    """Loaded reward functions, their weights, and the weight of the recipe's own total."""

    functions: dict[str, RewardFunction] = dataclasses.field(default_factory=dict)
    """Reward component -> its function."""
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    """Reward component -> its weight."""
    recipe_weight: float = 1.0

    def add_to(self, trajectories: Sequence[Trajectory]) -> None:
        """Add the weighted rewards to scored trajectories, in place.

        With bonus = the sum of weight · value over the functions, "total" becomes recipe_weight · total + bonus. If turns have
        rewards, each is multiplied by `recipe_weight`, and the last of them gets the bonus. The unweighted value of each function
        is stored in `rewards` under its name.

        Raises UserError if a function fails, or returns anything but a finite number.
        """
        if not self.functions:
            return
        for trajectory in trajectories:
            added = {name: _call(name, function, trajectory) for name, function in self.functions.items()}
            bonus = sum(self.weights[name] * value for name, value in added.items())
            total = self.recipe_weight * trajectory.rewards["total"] + bonus
            trajectory.rewards = {**trajectory.rewards, **added, "total": total}
            if trajectory.turn_rewards:
                turns = {turn: self.recipe_weight * r for turn, r in trajectory.turn_rewards.items()}
                turns[max(turns)] += bonus
                trajectory.turn_rewards = turns


NO_FUNCTIONS = RewardFunctions()
"""The recipe's own rewards alone."""


def _call(name: str, function: RewardFunction, trajectory: Trajectory) -> float:
    """Return what a reward function gives a trajectory. Raises UserError if that is not a finite number."""
    if name in trajectory.rewards:
        raise UserError(
            f"rewards.functions: {name!r} is a reward component of the recipe already; rename the function"
        )
    question = trajectory.question
    try:
        value = function(trajectory, question)
    except Exception as error:
        raise UserError(
            f"rewards.functions: {name} failed on question {question.id!r}: {describe_error(error)}"
        ) from error
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise UserError(
            f"rewards.functions: {name} returned {value!r} for question {question.id!r}; it must return a finite number"
        )
    return float(value)
