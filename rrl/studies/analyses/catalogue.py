"""The analyses, and the papers' figures and tables that they correspond to. The list is `ANALYSES`.

There are two kinds. Some vary one value of an evaluation (number of steps, passages per search, retriever) for existing policies.
The others train policies in different ways over seeds; runs that the reproduction plans too are shared with it.
"""

import dataclasses
from collections.abc import Mapping

from rrl.config.config_flag import with_arguments
from rrl.errors import UserError
from rrl.studies.reproduction.plan import ARMS, SHIPPED_POLICY, SHIPPED_READER, Arm
from rrl.studies.reproduction.results import SEED

ONE_TO_TEN = tuple(map(str, range(1, 11)))


@dataclasses.dataclass(frozen=True)
class Analysis:
    """One analysis: either evaluates `policies` at each of `values`, or trains `arms` over seeds."""

    title: str
    source: str
    """The papers' figures and tables."""
    varies: str = ""
    """What is varied in the evaluation: "steps" (the method's own step limit, see `points.STEP_LIMITS`), "top_k",
    "retriever", or "" for nothing."""
    values: tuple[str, ...] = ()
    policies: tuple[str, ...] = (f"rsearch@{SHIPPED_POLICY}",)
    """Default policies, as METHOD@FOLDER."""
    arms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Label of a row -> name of a planned evaluation, for an analysis that trains policies. `SEED` in a name stands for each
    seed."""
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
"""The arms of the reproduction, and further arms that only analyses use. The latter have as many updates as the arm they vary."""
REWARD_CURVES = {
    "reward/total": "reward",
    "reward/answer": "answer reward",
    "train/searches": "searches per question",
}
ANSWER_CURVES = {"reward/answer": "answer reward", "reward/thinking": "thinking reward"}


def _evaluation_of(arm: str) -> str:
    """Return the name of the evaluation of an arm's policies, with `SEED` for the seed."""
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


def analysis_named(what: str) -> Analysis:
    """Return the analysis of that name. Raises UserError for an unknown one."""
    if what not in ANALYSES:
        raise UserError(f"what={what!r} is unknown; choose {', '.join(ANALYSES)}")
    return ANALYSES[what]
