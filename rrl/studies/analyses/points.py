"""The points of an analysis and the runs that they need. Read `training_points` and `evaluation_points` first."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rrl.config.config_flag import with_arguments
from rrl.errors import UserError
from rrl.recipes.card import read_card
from rrl.recipes.catalogue import RECIPES, make_recipe
from rrl.recipes.prompted.catalogue import METHODS, make_prompted_method
from rrl.studies.analyses.catalogue import TRAINING_ARMS, Analysis
from rrl.studies.reproduction.plan import SHIPPED_READER, PlannedRun, planned_runs, smoke_run
from rrl.studies.reproduction.results import expand_seeds
from rrl.studies.sweep import folder_of

STEP_LIMITS = ("max_steps", "max_searches", "expansions", "steps", "rounds", "sentences", "searches")
"""Possible names of the field that limits the number of steps. For each recipe environment or prompted method, the first of these
names that it has is used."""
RETRIEVAL_ONLY = ("r2ag",)
"""Recipes that only retrieve; a reader writes their answers."""


@dataclasses.dataclass(frozen=True)
class AnalysisPoint:
    """One point of the plot and one row of the table."""

    system: str
    """Label of the policy or arm."""
    value: str
    """The varied value; "" if nothing is varied."""
    runs: tuple[str, ...]
    """Names of its evaluations, one per training seed."""


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
    """Options of an analysis that evaluates existing policies."""

    policies: Sequence[str] = ()
    """METHOD@FOLDER, or the FOLDER of a policy whose recipe card names the method; default: the analysis's policies."""
    values: Sequence[str] = ()
    """Values of what is varied; default: the analysis's values. Outside the built-in world, give a retriever with an encoder as
    KIND@FOLDER, with the folder of the encoder."""
    arguments: Sequence[str] = ()
    """Further arguments of configs/eval.py, such as questions=100. A reader is passed only to recipes that need one; in the
    built-in world their default is the shipped reader."""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Config fields to override: dotted name -> value."""


def training_points(
    analysis: Analysis, seeds: Sequence[int], smoke: bool = False
) -> tuple[list[AnalysisPoint], dict[str, PlannedRun]]:
    """Return the points of an analysis that trains arms, and all planned runs by name."""
    points = [
        AnalysisPoint(label, "", tuple(expand_seeds(run, seeds))) for label, run in analysis.arms.items()
    ]
    return points, planned_runs(seeds, smoke, TRAINING_ARMS)


def evaluation_points(
    analysis: Analysis, options: EvaluationOptions, smoke: bool = False
) -> tuple[list[AnalysisPoint], dict[str, PlannedRun]]:
    """Return the points of an analysis that evaluates existing policies, and their runs by name.

    Raises:
      UserError: a policy has no recipe card or is listed twice, an argument is set by the analysis itself, or steps are varied
        for a method without a step limit.
    """
    policies = options.policies or analysis.policies
    systems = [_method_and_folder(policy) for policy in policies]
    if len(set(systems)) < len(systems):
        raise UserError(f"policy={','.join(policies)}: one is listed twice; give each once")
    if options.values and not analysis.varies:
        raise UserError(
            f"values={','.join(options.values)}: nothing is varied in {analysis.title!r}; leave them out"
        )
    _refuse_reserved_arguments(analysis, options.arguments)
    methods = [method for method, _ in systems]
    points, planned = [], {}
    for method, folder in systems:
        label = method if methods.count(method) == 1 else f"{method}@{folder}"
        for value in options.values or analysis.values or [""]:
            varied_arguments, varied_fields = _overrides(analysis.varies, method, value)
            arguments = [f"method={method}", f"policy={folder}", *varied_arguments]
            config = with_arguments(
                "configs/eval.py", *arguments, *_further_arguments(method, options.arguments)
            )
            name = _run_name(label, value)
            if name in planned:
                raise UserError(f"policy={label}, value={value}: two runs would share the folder {name}")
            run = PlannedRun(name, "eval", config, 1.0, {**options.fields, **varied_fields})
            planned[name] = smoke_run(run) if smoke else run
            points.append(AnalysisPoint(label, value, (name,)))
    return points, planned


def _refuse_reserved_arguments(analysis: Analysis, arguments: Sequence[str]) -> None:
    """Raise UserError for arguments of configs/eval.py that the analysis sets itself."""
    names = {"method", "policy", *({analysis.varies} & {"top_k", "retriever"})}
    if wrong := [argument for argument in arguments if argument.partition("=")[0].strip() in names]:
        raise UserError(f"arguments={','.join(wrong)}: the analysis sets this itself; leave it out")


def _further_arguments(method: str, arguments: Sequence[str]) -> list[str]:
    """Return the user's arguments for one method, with a reader only for a method that needs one."""
    readers = [argument for argument in arguments if argument.startswith("reader=")]
    others = [argument for argument in arguments if argument not in readers]
    if method not in RETRIEVAL_ONLY:
        return others
    is_builtin = not any(argument.startswith("dataset=") for argument in arguments)
    return others + (readers or [f"reader={SHIPPED_READER}"] * is_builtin)


def _method_and_folder(policy: str) -> tuple[str, str]:
    """Return (method, folder) of METHOD@FOLDER or FOLDER."""
    method, at, folder = policy.rpartition("@")
    if at:
        return method, folder
    card = read_card(folder)
    if card is None:
        raise UserError(
            f"policy={policy!r}: the folder has no recipe card that names its method; give METHOD@{policy}"
        )
    return card.recipe, folder


def _overrides(varies: str, method: str, value: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the fields of configs/eval.py that set the varied value."""
    if varies == "retriever":
        kind, at, encoder = value.partition("@")
        return [f"retriever={kind}", *([f"encoder={encoder}"] if at else [])], {}
    if varies == "top_k":
        return [f"top_k={value}"], {}
    return [], {_step_limit_of(method): value} if varies == "steps" else {}


def _step_limit_of(method: str) -> str:
    """Return the dotted name of the field that limits a method's steps.

    Raises UserError for an unknown method, and for one without such a field.
    """
    if method in METHODS:
        section, names = "method", list(make_prompted_method(method).option_values)
    elif method in RECIPES:
        environment: Any = make_recipe(method).environment
        section, names = "recipe.environment", [field.name for field in dataclasses.fields(environment)]
    else:
        raise UserError(
            f"method={method!r} is unknown; recipes are {', '.join(RECIPES)}; prompted methods {', '.join(METHODS)}"
        )
    field_name = next((name for name in STEP_LIMITS if name in names), None)
    if field_name is None:
        raise UserError(f"method={method!r} has no step limit to vary; leave it out")
    return f"{section}.{field_name}"


def _run_name(*parts: str) -> str:
    """Return the name of a run, which is also its folder: the parts that are not empty, joined by hyphens."""
    return "-".join(folder_of(part) for part in parts if part)
