"""What is run: cold starts, training runs over seeds, and an evaluation of each policy on the same held-out questions.

Every run is one command of `launch/`, so that any row of the page can be made again by hand. Sizes are chosen so that all fit
into three hours on two cores, one run a core: TIRESRAG-R1, R3-RAG and R2AG have numbers of updates and demonstrations of their
own here, R3-RAG and R2AG other settings too, whatever their configs take; rates fall to 0 within those updates.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rrl.studies.compare import with_arguments

SHIPPED_POLICY = "assets/miniwiki-policy"
SHIPPED_READER = "assets/miniwiki-reader"


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One command, whose workdir is a folder of its name."""

    name: str
    launcher: str
    """train, sft or eval."""
    config: str
    """Config file with arguments; "{out}" stands for the folder of all runs."""
    minutes: float
    """About how long on one core of the slower machine that measured the published page; a faster one took half as long."""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Single fields of the config that are changed."""
    needs: tuple[str, ...] = ()
    """Runs whose models it starts from."""

    def command(self, out: str | Path) -> list[str]:
        """Arguments of `python`."""
        flags = [f"--config={self.config}", f"--workdir={{out}}/{self.name}"]
        flags += [f"--config.{field}={value}" for field, value in self.fields.items()]
        return [f"launch/{self.launcher}.py", *(flag.replace("{out}", str(out)) for flag in flags)]


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to train a policy, once for each seed."""

    recipe: str
    config: str
    minutes: float
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    start: str = ""
    """The cold start, a run; "": the shipped policy."""


# What the published page was measured with, where the configs have gone on.
R3RAG_FIELDS = {
    "optim.lr": 3e-4,
    "optim.warmup_ratio": 0.3,
    "critic.layers": 0,
    "critic.minibatches": 8,
    "critic.warmup_steps": 3,
    "rollout.rows": 64,
}
R2AG_FIELDS = {"train.questions": 32, "train.samples": 8, "optim.lr": 3e-4}
ARMS: Mapping[str, Arm] = {
    "rsearch": Arm("rsearch", "configs/rsearch_grpo.py", 11),
    # The evidence stays in what the policy was shown to write, and neither reward reads it.
    "rsearch_no_evidence": Arm("rsearch", "configs/rsearch_grpo.py", 11, {"recipe.use_evidence": False}),
    # As long as GRPO's run: an update learns from all answers, and teaches the critic.
    "rsearch_ppo": Arm("rsearch", "configs/rsearch_ppo.py:steps=30", 14),
    "r3rag": Arm("r3rag", "configs/r3rag_ppo.py:steps=22", 15, R3RAG_FIELDS, start="r3rag_cold"),
    "r3rag_no_process": Arm(
        "r3rag", "configs/r3rag_ppo.py:steps=22,ablation=process", 15, R3RAG_FIELDS, start="r3rag_cold"
    ),
    "tiresrag": Arm("tiresrag", "configs/tiresrag_grpo.py:steps=42", 7, start="tiresrag_cold"),
    "tiresrag_no_filter": Arm(
        "tiresrag", "configs/tiresrag_grpo.py:steps=42,ablation=filter", 11, start="tiresrag_cold"
    ),
    "tiresrag_naive": Arm(
        "tiresrag", "configs/tiresrag_grpo.py:steps=42,ablation=naive", 10, start="tiresrag_cold"
    ),
    "r2ag": Arm("r2ag", "configs/r2ag.py:steps=48", 10, R2AG_FIELDS, start="r2ag_cold"),
}
COLD_STARTS = {
    "r3rag_cold": "recipe=r3rag,demonstrations=150",
    # As few as R3-RAG's: after 500 the shipped policy answers 74 %, and RL finds nothing to add.
    "tiresrag_cold": "recipe=tiresrag,demonstrations=150",
    "r2ag_cold": "recipe=r2ag,demonstrations=150",
}
"""Arguments of configs/miniwiki_cold_start.py beside the shipped policy, where each begins."""
PROMPTED: Mapping[str, tuple[str, float, Mapping[str, Any]]] = {
    "direct": ("method=direct", 0.2, {}),
    "naive_rag": ("method=naive_rag", 0.3, {}),
    "naive_rag_bm25": ("method=naive_rag,retriever=bm25", 0.3, {}),
    "naive_rag_exact": ("method=naive_rag,retriever=exact", 0.3, {}),
    # What a tree of searches is held against: as many of these as it found.
    "naive_rag_top16": ("method=naive_rag,top_k=16", 0.5, {"prompted.most_passages": 4}),
    "iter_retgen": ("method=iter_retgen", 0.4, {}),
    "ircot": ("method=ircot", 0.6, {"method.steps": 4}),
}
"""Prompted methods: arguments of configs/eval.py, minutes, fields. The shipped reader is asked: of the shipped models it is
the one that was trained to answer a question from passages."""
EVALUATION = {"rsearch": 0.5, "r3rag": 0.6, "tiresrag": 0.5, "r2ag": 1.0}
"""Minutes of an evaluation, by recipe."""
RETRIEVERS = ("exact", "bm25")
"""Other ones than R3-RAG's policy is trained with."""
SHORT_HELD_OUT = {"data.held_out_per_kind": 20, "train.eval_every": 0}
"""Training looks at few held-out questions: each policy is evaluated on all of them afterwards."""

SMOKE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "train": (
        "steps=2",
        {
            "data.held_out_per_kind": 2,
            "data.held_out_worlds": 1,
            "train.questions": 4,
            "train.eval_every": 0,
            "rollout.rows": 16,
        },
    ),
    "sft": (
        "steps=2,demonstrations=16",
        {"data.train_worlds": 2, "data.held_out_worlds": 1, "data.demonstrations.held_out": 4},
    ),
    "eval": ("questions=10", {"data.worlds": 1, "rollout.rows": 16}),
}
"""Arguments and fields that make a run so small that it is only looked at whether it goes through."""


def planned_runs(
    seeds: Sequence[int], smoke: bool = False, arms: Mapping[str, Arm] | None = None
) -> dict[str, PlannedRun]:
    """All runs of these arms (none given: of `ARMS`) by name, in an order in which each comes after those that it needs."""
    found = [_prompted_evaluation(name, *told) for name, told in PROMPTED.items()]
    found.append(_policy_evaluation("rsearch_cold-eval", "rsearch", SHIPPED_POLICY))
    for arm, how in (ARMS if arms is None else arms).items():
        if how.start and how.start not in {run.name for run in found}:
            shown = f"configs/miniwiki_cold_start.py:{COLD_STARTS[how.start]},init={SHIPPED_POLICY}"
            found.append(PlannedRun(how.start, "sft", shown, 4))
            found += _evaluations(how.start, how.recipe, f"{{out}}/{how.start}/model")
        for seed in seeds:
            found += _training(arm, how, seed)
    return {run.name: smoke_run(run) if smoke else run for run in found}


def _training(arm: str, how: Arm, seed: int) -> list[PlannedRun]:
    """A training run and the evaluations of its policy."""
    name = f"{arm}-{seed}"
    start = [f"policy={{out}}/{how.start}/model"] * bool(how.start)
    config = with_arguments(how.config, f"seed={seed}", *start)
    needs = (how.start,) if how.start else ()
    policy = f"{{out}}/{name}/policy"
    found = [PlannedRun(name, "train", config, how.minutes, {**SHORT_HELD_OUT, **how.fields}, needs)]
    if arm == "r3rag":
        return found + _evaluations(name, how.recipe, policy)
    return [*found, _policy_evaluation(f"{name}-eval", how.recipe, policy, (name,))]


def _evaluations(name: str, recipe: str, policy: str) -> list[PlannedRun]:
    """The evaluations of a run's policy; R3-RAG's with the other retrievers too."""
    others = RETRIEVERS if recipe == "r3rag" else ()
    found = [
        _policy_evaluation(f"{name}-{other}", recipe, policy, (name,), f"retriever={other}")
        for other in others
    ]
    return [_policy_evaluation(f"{name}-eval", recipe, policy, (name,)), *found]


def _policy_evaluation(
    name: str, recipe: str, policy: str, needs: tuple[str, ...] = (), *more: str
) -> PlannedRun:
    # R2AG's: a passage for each query, as it is trained.
    tree = [f"reader={SHIPPED_READER}", "top_k=1"] * (recipe == "r2ag")
    config = with_arguments("configs/eval.py", f"method={recipe}", f"policy={policy}", *tree, *more)
    return PlannedRun(name, "eval", config, EVALUATION[recipe], needs=needs)


def _prompted_evaluation(name: str, arguments: str, minutes: float, fields: Mapping[str, Any]) -> PlannedRun:
    return PlannedRun(name, "eval", f"configs/eval.py:{arguments},policy={SHIPPED_READER}", minutes, fields)


def smoke_run(run: PlannedRun) -> PlannedRun:
    """The same run so small that it is only looked at whether it goes through."""
    arguments, fields = SMOKE[run.launcher]
    config = with_arguments(run.config, *arguments.split(","))
    return dataclasses.replace(run, config=config, fields={**run.fields, **fields})


def with_dependencies(names: Sequence[str], known: Mapping[str, PlannedRun]) -> list[PlannedRun]:
    """These runs and all that they need, in the order of `known`."""
    wanted, todo = set[str](), list(names)
    while todo:
        name = todo.pop()
        if name not in wanted:
            wanted.add(name)
            todo += known[name].needs
    return [run for run in known.values() if run.name in wanted]
