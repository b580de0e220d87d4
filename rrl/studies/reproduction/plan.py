"""Lists the planned runs: cold starts, training runs over seeds, and an evaluation of each policy on the
same held-out questions. Read `planned_runs` first.

Every run is one command of `launch/`, so each row of the page can be reproduced by hand. All runs
together fit into three hours on two cores, with one run per core. For that, TIRESRAG-R1, R3-RAG and
R2AG have their own numbers of updates and demonstrations here, and R3-RAG and R2AG also some other
settings; these differ from their configs. The learning rate decays to 0 within those updates.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rrl.config.config_flag import with_arguments

SHIPPED_POLICY = "assets/miniwiki-policy"
SHIPPED_READER = "assets/miniwiki-reader"


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One command of `launch/`. Its workdir has the name of the run."""

    name: str
    launcher: str
    """"train", "sft" or "eval": the file in `launch/`."""
    config: str
    """Config file with arguments; "{out}" stands for the folder of all runs."""
    minutes: float
    """Estimated minutes on one core of the slower of two measured machines; the faster one took half as long."""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Config fields that are overridden: dotted name -> value."""
    needs: tuple[str, ...] = ()
    """Names of the runs whose models it starts from."""

    def command(self, out: str | Path) -> list[str]:
        """Return the arguments of `python`."""
        flags = [f"--config={self.config}", f"--workdir={{out}}/{self.name}"]
        flags += [f"--config.{field}={value}" for field, value in self.fields.items()]
        return [f"launch/{self.launcher}.py", *(flag.replace("{out}", str(out)) for flag in flags)]


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train a policy; it becomes one training run per seed."""

    recipe: str
    """Recipe of the policy, which its evaluations use."""
    config: str
    """Config file of launch/train.py with arguments, without seed and policy."""
    minutes: float
    """As `PlannedRun.minutes`."""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """As `PlannedRun.fields`."""
    start: str = ""
    """Name of the cold-start run; "": the shipped policy."""


# Settings with which the published page was measured. The configs' own settings have changed since, so they are stated here.
R3RAG_FIELDS = {
    "optim.lr": 3e-4,
    "optim.warmup_ratio": 0.3,
    "critic.layers": 0,  # all layers of the policy
    "critic.minibatches": 8,
    "critic.warmup_steps": 3,
    "rollout.rows": 64,
}
R2AG_FIELDS = {"train.questions": 32, "train.samples": 8, "optim.lr": 3e-4}
ARMS: Mapping[str, Arm] = {
    "rsearch": Arm("rsearch", "configs/rsearch_grpo.py", 11),
    # The policy still writes evidence, as in its demonstrations, but no reward uses it.
    "rsearch_no_evidence": Arm("rsearch", "configs/rsearch_grpo.py", 11, {"recipe.use_evidence": False}),
    # 30 updates take about as long as GRPO's run: a PPO update uses all trajectories and also trains the critic.
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
    # After 500 demonstrations the policy would answer 74 %, and RL would no longer improve it.
    "tiresrag_cold": "recipe=tiresrag,demonstrations=150",
    "r2ag_cold": "recipe=r2ag,demonstrations=150",
}
"""Cold-start run -> arguments of configs/miniwiki_cold_start.py. Each one starts from the shipped policy."""
PROMPTED: Mapping[str, tuple[str, float, Mapping[str, Any]]] = {
    "direct": ("method=direct", 0.2, {}),
    "naive_rag": ("method=naive_rag", 0.3, {}),
    "naive_rag_bm25": ("method=naive_rag,retriever=bm25", 0.3, {}),
    "naive_rag_exact": ("method=naive_rag,retriever=exact", 0.3, {}),
    # The single search that R2AG's trees are compared with. Only as many of its 16 passages count as a tree found.
    "naive_rag_top16": ("method=naive_rag,top_k=16", 0.5, {"prompted.most_passages": 4}),
    "iter_retgen": ("method=iter_retgen", 0.4, {}),
    "ircot": ("method=ircot", 0.6, {"method.steps": 4}),
}
"""Evaluations of prompted methods: name of the run -> (arguments of configs/eval.py, estimated minutes, overridden fields). The
model is the shipped reader, the only shipped model that was trained to answer a question from passages."""
EVALUATION_MINUTES = {"rsearch": 0.5, "r3rag": 0.6, "tiresrag": 0.5, "r2ag": 1.0}
"""Recipe -> estimated minutes of an evaluation."""
RETRIEVERS = ("exact", "bm25")
"""Retrievers that the policies of "r3rag" and "r3rag_cold" are evaluated with, beside the one they are trained with."""
SHORT_HELD_OUT = {"data.held_out_per_kind": 20, "train.eval_every": 0}
"""Fields of every training run. It evaluates on few held-out questions only, since each policy gets a full
evaluation afterwards."""

SMOKE_SIZES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
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
"""Launcher -> arguments and fields of a smoke run, which only checks that the command completes."""


def planned_runs(
    seeds: Sequence[int], smoke: bool = False, arms: Mapping[str, Arm] | None = None
) -> dict[str, PlannedRun]:
    """Return all runs of these arms (default: `ARMS`) by name; each run comes after those that it needs."""
    runs = [_prompted_evaluation(name, *settings) for name, settings in PROMPTED.items()]
    runs.append(_policy_evaluation("rsearch_cold-eval", "rsearch", SHIPPED_POLICY))
    for name, arm in (ARMS if arms is None else arms).items():
        if arm.start and arm.start not in {run.name for run in runs}:
            config = f"configs/miniwiki_cold_start.py:{COLD_STARTS[arm.start]},init={SHIPPED_POLICY}"
            runs.append(PlannedRun(arm.start, "sft", config, 4))
            runs += _evaluations(arm.start, arm.recipe, f"{{out}}/{arm.start}/model")
        for seed in seeds:
            runs += _training(name, arm, seed)
    return {run.name: smoke_run(run) if smoke else run for run in runs}


def _training(arm_name: str, arm: Arm, seed: int) -> list[PlannedRun]:
    """Return a training run and the evaluations of its policy."""
    name = f"{arm_name}-{seed}"
    start = [f"policy={{out}}/{arm.start}/model"] * bool(arm.start)
    config = with_arguments(arm.config, f"seed={seed}", *start)
    needs = (arm.start,) if arm.start else ()
    policy = f"{{out}}/{name}/policy"
    runs = [PlannedRun(name, "train", config, arm.minutes, {**SHORT_HELD_OUT, **arm.fields}, needs)]
    if arm_name == "r3rag":  # no claim reads r3rag_no_process with the other retrievers
        return runs + _evaluations(name, arm.recipe, policy)
    return [*runs, _policy_evaluation(f"{name}-eval", arm.recipe, policy, (name,))]


def _evaluations(name: str, recipe: str, policy: str) -> list[PlannedRun]:
    """Return the evaluations of a run's policy; R3-RAG's policies are also evaluated with the other
    retrievers."""
    evaluations = [_policy_evaluation(f"{name}-eval", recipe, policy, (name,))]
    if recipe == "r3rag":
        evaluations += [
            _policy_evaluation(f"{name}-{retriever}", recipe, policy, (name,), f"retriever={retriever}")
            for retriever in RETRIEVERS
        ]
    return evaluations


def _policy_evaluation(
    name: str, recipe: str, policy: str, needs: tuple[str, ...] = (), *more: str
) -> PlannedRun:
    # R2AG retrieves one passage per query, as in training, and a reader writes its answer.
    r2ag_arguments = [f"reader={SHIPPED_READER}", "top_k=1"] * (recipe == "r2ag")
    config = with_arguments("configs/eval.py", f"method={recipe}", f"policy={policy}", *r2ag_arguments, *more)
    return PlannedRun(name, "eval", config, EVALUATION_MINUTES[recipe], needs=needs)


def _prompted_evaluation(name: str, arguments: str, minutes: float, fields: Mapping[str, Any]) -> PlannedRun:
    return PlannedRun(name, "eval", f"configs/eval.py:{arguments},policy={SHIPPED_READER}", minutes, fields)


def smoke_run(run: PlannedRun) -> PlannedRun:
    """Return the same run with the sizes of a smoke run."""
    arguments, fields = SMOKE_SIZES[run.launcher]
    config = with_arguments(run.config, *arguments.split(","))
    return dataclasses.replace(run, config=config, fields={**run.fields, **fields})


def with_dependencies(names: Sequence[str], planned: Mapping[str, PlannedRun]) -> list[PlannedRun]:
    """Return these runs and all runs that they need, in the order of `planned`."""
    wanted, todo = set[str](), list(names)
    while todo:
        name = todo.pop()
        if name not in wanted:
            wanted.add(name)
            todo += planned[name].needs
    return [run for run in planned.values() if run.name in wanted]
