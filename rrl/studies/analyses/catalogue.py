"""Lists the analyses, the papers' figures and tables that they correspond to, and the runs that they need.
The list is `ANALYSES`.

There are two kinds. Some vary one value of an evaluation (number of steps, passages per search,
retriever) for existing policies. The others train policies in different ways over seeds; they share
these runs with the reproduction.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rrl.errors import UserError
from rrl.recipes.card import read_card
from rrl.recipes.catalogue import RECIPES, make_recipe
from rrl.recipes.prompted.catalogue import METHODS, make_prompted_method
from rrl.studies.compare import with_arguments
from rrl.studies.reproduction.plan import (
    ARMS,
    SHIPPED_POLICY,
    SHIPPED_READER,
    Arm,
    PlannedRun,
    planned_runs,
    smoke_run,
)
from rrl.studies.reproduction.results import SEED, expand_seeds
from rrl.studies.sweep import folder_of

ONE_TO_TEN = tuple(map(str, range(1, 11)))
STEP_LIMITS = ("max_steps", "max_searches", "expansions", "steps", "rounds", "sentences", "searches")
"""Possible names of the field that limits the number of steps. For each recipe environment or prompted method, the
first of these names that it has is used."""
RETRIEVAL_ONLY = ("r2ag",)
"""Recipes that only retrieve; a reader writes their answers."""


@dataclasses.dataclass(frozen=True)
class Analysis:
    """One analysis: either evaluates `policies` at each of `values`, or trains `arms` over seeds."""

    title: str
    source: str
    """The papers' figures and tables."""
    varies: str = ""
    """What is varied in the evaluation: "steps" (the method's own step limit, see `STEP_LIMITS`), "top_k",
    "retriever", or "" for nothing."""
    values: tuple[str, ...] = ()
    policies: tuple[str, ...] = (f"rsearch@{SHIPPED_POLICY}",)
    """Default policies, as METHOD@FOLDER."""
    arms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Label of a row -> planned evaluation, for an analysis that trains policies."""
    curves: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Column of metrics.jsonl that is plotted over the updates -> title."""


def _with_argument(arm: str, argument: str) -> Arm:
    """Return an arm of the reproduction with a further config argument."""
    return dataclasses.replace(ARMS[arm], config=with_arguments(ARMS[arm].config, argument))


ABLATED_PARTS = ("difficulty", "penalty", "reflect", "sufficient", "thinking")
"""The parts that TIRESRAG-R1's ablations leave out. The ablation of the filter is already
among `ARMS`."""
TRAINING_ARMS: Mapping[str, Arm] = {
    **ARMS,
    **{f"tiresrag_no_{part}": _with_argument("tiresrag", f"ablation={part}") for part in ABLATED_PARTS},
    **{
        f"tiresrag_{name}": _with_argument("tiresrag", f"schedule={name}")
        for name in ("fixed", "linear", "fast")
    },
    "tiresrag_reinforce": _with_argument("tiresrag", "estimator=reinforce_pp"),
}
"""The arms of the reproduction, and further arms that only analyses use. Their sizes are the same."""
REWARD_CURVES = {
    "reward/total": "reward",
    "reward/answer": "answer reward",
    "train/searches": "searches per question",
}
ANSWER_CURVES = {"reward/answer": "answer reward", "reward/thinking": "thinking reward"}


def _evaluation_of(arm: str) -> str:
    return f"{arm}-{SEED}-eval"


ANALYSES: Mapping[str, Analysis] = {
    "max_steps": Analysis("Maximum number of steps", "R3-RAG, Figure 3", "steps", ONE_TO_TEN),
    "top_k": Analysis(
        "Passages per search",
        "R3-RAG, Figure 4; TIRESRAG-R1, Figure 3; R2AG, Table A.6",
        "top_k",
        ONE_TO_TEN,
    ),
    "retrievers": Analysis(
        "Other retrievers",
        "R3-RAG, Tables 3 and 5",
        "retriever",
        ("scann", "exact", "bm25"),
        (f"rsearch@{SHIPPED_POLICY}", f"naive_rag@{SHIPPED_READER}"),
    ),
    "tokens": Analysis(
        "Tokens per right answer",
        "R3-RAG, Table 4; TIRESRAG-R1, Table 5",
        policies=(
            f"rsearch@{SHIPPED_POLICY}",
            *(f"{name}@{SHIPPED_READER}" for name in ("direct", "naive_rag", "iter_retgen")),
        ),
    ),
    "rewards_r3rag": Analysis(
        "Effect of the rewards",
        "R3-RAG, Table 2",
        arms={
            "R3-RAG": _evaluation_of("r3rag"),
            "- process reward": _evaluation_of("r3rag_no_process"),
            "- outcome reward (cold start)": "r3rag_cold-eval",
        },
        curves=REWARD_CURVES,
    ),
    "rewards_tiresrag": Analysis(
        "Ablation study",
        "TIRESRAG-R1, Table 7, Figures 6 and 7",
        arms={
            "TIRESRAG-R1": _evaluation_of("tiresrag"),
            "naive GRPO": _evaluation_of("tiresrag_naive"),
            **{f"w/o {part}": _evaluation_of(f"tiresrag_no_{part}") for part in ("filter", *ABLATED_PARTS)},
        },
        curves=ANSWER_CURVES,
    ),
    "evidence": Analysis(
        "Evidence rewards",
        "R-Search, Tables 3 and 6",
        arms={
            "R-Search": _evaluation_of("rsearch"),
            "w/o evidence rewards": _evaluation_of("rsearch_no_evidence"),
        },
        curves=REWARD_CURVES,
    ),
    "grpo_ppo": Analysis(
        "PPO against GRPO",
        "R-Search, Tables 4 and 7, Figure 3",
        arms={"GRPO": _evaluation_of("rsearch"), "PPO": _evaluation_of("rsearch_ppo")},
        curves=REWARD_CURVES,
    ),
    "estimators": Analysis(
        "GRPO against REINFORCE++",
        "TIRESRAG-R1, Table 4",
        arms={"GRPO": _evaluation_of("tiresrag"), "REINFORCE++": _evaluation_of("tiresrag_reinforce")},
        curves=ANSWER_CURVES,
    ),
    "schedules": Analysis(
        "Schedules of the weight a_t",
        "TIRESRAG-R1, Figures 4 and 5",
        arms={
            "paper": _evaluation_of("tiresrag"),
            **{name: _evaluation_of(f"tiresrag_{name}") for name in ("fixed", "linear", "fast")},
        },
        curves={"train/auxiliary_weight": "weight a_t", **ANSWER_CURVES},
    ),
}
"""Name of an analysis on the command line -> analysis."""


@dataclasses.dataclass(frozen=True)
class AnalysisPoint:
    """One point of the plot and one row of the table."""

    system: str
    """Label of the policy or arm."""
    value: str
    """The varied value; "" if nothing is varied."""
    runs: tuple[str, ...]
    """Names of its evaluations, one per training seed."""


def analysis_named(what: str) -> Analysis:
    """Return the analysis of that name. Raises UserError for an unknown one."""
    if what not in ANALYSES:
        raise UserError(f"what={what!r} is unknown; choose {', '.join(ANALYSES)}")
    return ANALYSES[what]


def training_points(
    analysis: Analysis, seeds: Sequence[int], smoke: bool = False
) -> tuple[list[AnalysisPoint], dict[str, PlannedRun]]:
    """Return the points of an analysis that trains arms, and all planned runs by name."""
    points = [
        AnalysisPoint(label, "", tuple(expand_seeds(run, seeds))) for label, run in analysis.arms.items()
    ]
    return points, planned_runs(seeds, smoke, TRAINING_ARMS)


def evaluation_points(
    analysis: Analysis,
    policies: Sequence[str] = (),
    values: Sequence[str] = (),
    arguments: Sequence[str] = (),
    fields: Mapping[str, Any] | None = None,
    smoke: bool = False,
) -> tuple[list[AnalysisPoint], dict[str, PlannedRun]]:
    """Return the points of an analysis that evaluates existing policies, and their runs by name.

    Args:
      policies: METHOD@FOLDER, or the FOLDER of a policy whose recipe card names the method; default:
        the analysis's policies.
      values: values of what is varied; default: the analysis's values. Outside the built-in world, a
        retriever that needs an encoder is KIND@FOLDER.
      arguments: further arguments of configs/eval.py, such as questions=100. A reader is passed only to
        recipes that need one; in the built-in world their default is the shipped reader.
      fields: config fields to override: dotted name -> value.

    Raises:
      UserError: a policy has no recipe card or is listed twice, an argument is set by the analysis
        itself, or steps are varied for a method without a step limit.
    """
    systems = [_method_and_folder(policy) for policy in policies or analysis.policies]
    if len(set(systems)) < len(systems):
        raise UserError(f"policy={','.join(policies)}: one is listed twice; give each once")
    if values and not analysis.varies:
        raise UserError(f"values={','.join(values)}: nothing is varied in {analysis.title!r}; leave them out")
    values = list(values or analysis.values or [""])
    set_here = {"method", "policy", *({analysis.varies} & {"top_k", "retriever"})}
    if wrong := [argument for argument in arguments if argument.partition("=")[0].strip() in set_here]:
        raise UserError(f"arguments={','.join(wrong)}: the analysis sets this itself; leave it out")
    reader_argument = [argument for argument in arguments if argument.startswith("reader=")]
    rest = [argument for argument in arguments if argument not in reader_argument]
    builtin = not any(argument.startswith("dataset=") for argument in arguments)
    methods = [method for method, _ in systems]
    points, planned = [], {}
    for method, folder in systems:
        label = method if methods.count(method) == 1 else f"{method}@{folder}"
        for value in values:
            varied_arguments, varied_fields = _overrides(analysis.varies, method, value)
            config = with_arguments(
                "configs/eval.py", f"method={method}", f"policy={folder}", *varied_arguments, *rest
            )
            if method in RETRIEVAL_ONLY:
                config = with_arguments(config, *(reader_argument or [f"reader={SHIPPED_READER}"] * builtin))
            name = _run_name(label, value)
            if name in planned:
                raise UserError(f"policy={label}, value={value}: two runs would share the folder {name}")
            run = PlannedRun(name, "eval", config, 1.0, {**(fields or {}), **varied_fields})
            planned[name] = smoke_run(run) if smoke else run
            points.append(AnalysisPoint(label, value, (name,)))
    return points, planned


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
        section, names = "method", list(make_prompted_method(method).defaults)
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
