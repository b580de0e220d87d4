"""What the configs of all recipes share: the arguments of a run, its data and retriever, its devices, its smoke run.

It imports no jax, so that a wrong argument is found at once.
"""

import types
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from rrl.config.arguments import parse, run_name
from rrl.errors import UserError

TENSOR_PARALLEL = {"tiny": 1, "3b": 2, "7b": 4}
"""Devices on the tensor axis. Qwen2.5-3B has 2 key-value heads, 7B has 4: so the axis shares them evenly, and no cache is held
twice."""
RUN_ARGUMENTS: Mapping[str, Any] = {
    "size": tuple(TENSOR_PARALLEL),
    "steps": int,
    "seed": 0,
    "data": "miniwiki",
    "policy": "",
    "encoder": "",
    "retriever": "",
    "control": ("none", "permuted", "search_off"),
}
"""The arguments of every config that trains a recipe, for `rrl.config.arguments.parse`."""


def parse_run_arguments(arg: str, **more: Any) -> types.SimpleNamespace:
    """The arguments of a training config: those of every run, and `more`. Raises UserError for a wrong one."""
    args = parse(arg, **RUN_ARGUMENTS, **more)
    if args.steps is not None and args.steps < 0:
        raise UserError(f"config argument steps={args.steps} must be at least 0, which evaluates only")
    refuse_unused_encoder(args)
    return args


def refuse_unused_encoder(args: types.SimpleNamespace) -> None:
    """Raises UserError for an encoder beside a retriever that has no use for one."""
    if args.encoder and args.retriever == "bm25":
        raise UserError(
            f"config argument encoder={args.encoder!r} has no meaning with retriever=bm25, which searches words; leave one out"
        )


def refuse_unused_with_ablation(args: types.SimpleNamespace, ablation: str, **usual: str) -> None:
    """Raises UserError for arguments that are not as they are where nothing is said (`usual`), beside the ablation that leaves
    out what they set."""
    for name, value in usual.items():
        if args.ablation == ablation and (given := getattr(args, name)) != value:
            raise UserError(
                f"config argument {name}={given} has no meaning with ablation={ablation}, which leaves out what it sets; leave "
                "one out"
            )


def base_config(stem: str, arg: str, args: types.SimpleNamespace) -> ConfigDict:
    """A config with the sections that no recipe changes: name, data, retriever, mesh, compute, lora and guard.

    `args` are those of `parse_run_arguments`, `stem` the config file's name. Each argument has a workdir of its own, so that a
    smoke run does not stand in the way of the main one.
    """
    tiny, real = args.size == "tiny", args.data != "miniwiki"
    kind = args.retriever or ("bm25" if real and not args.encoder else "scann")
    config = ConfigDict()
    config.name = run_name(f"{stem}_{args.size}", arg)
    config.reader = ""
    config.reader_rollout = {}
    config.data = {
        "path": args.data,
        "seed": 1,
        "held_out_split": "test",  # settings are chosen on "dev", whose worlds and names are others
        "on_error": "refuse",
        "held_out": 100 if tiny else 500,
    }
    config.retriever = {
        "kind": "off" if args.control == "search_off" else kind,
        "encoder": args.encoder or ("assets/miniwiki-encoder" if not real else ""),
        "title_weight": 1 if real else 3,
    }
    config.mesh = {"fsdp": 1 if tiny else -1, "tensor": TENSOR_PARALLEL[args.size]}
    config.compute = {"dtype": "float32" if tiny else "auto", "remat": "none" if tiny else "full"}
    # A rank above 0: adapters are trained, and the policy and its reference share all else.
    config.lora = {"rank": 0}
    # Says when reward or entropy stay at zero or the KL runs away; action=stop ends the run at its last good checkpoint.
    config.guard = {"action": "warn", "steps": 10}
    return config


def set_miniwiki_training(config: ConfigDict, args: types.SimpleNamespace, recipe: Mapping[str, Any]) -> None:
    """Sizes, objective and optimiser that were found for R-Search's cold-started policy (docs/recipes.md, "R-Search").

    Other recipes take them over, with `recipe`'s fields beside its name and what their own objective changes.
    """
    config.recipe = dict(recipe)
    config.recipe.environment = {"max_searches": 4, "turn_tokens": 128, "observation_tokens": 256}
    config.recipe.environment.correction = ""  # the policy was never shown one
    config.rollout = {
        "rows": 64,
        "oversubscribed_slots": 32,
        "context": 1024,
        "wake_threshold": 16,
        "prefill_tokens": 256,
        "draft_tokens": 1,
        "top_k": 2,
        "top_p": 0.95,
    }
    # A third more than R-Search's: groups that are all right or all wrong teach nothing here.
    steps = 90 if args.steps is None else args.steps
    config.train = {
        "steps": steps,
        "questions": 32,
        "samples": 4,
        "temperature": 1.0,
        "seed": args.seed,
        "eval_every": max(1, steps // 2),
        "eval_temperature": 0.0,
        "average_last": 0.5,
        "permute_rewards": args.control == "permuted",
    }
    config.objective = {
        "kl_coef": 0.1,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "row_lengths": (1024,),
        "microbatch_tokens": 2048,
        "parallel_microbatches": 2,
    }
    config.optim = {
        "name": "adamw",
        "lr": 3e-4,
        "warmup_ratio": 0.3,
        "weight_decay": 0.0,
        "clip_norm": 1.0,
        "schedule": "linear",
        "b2": 0.999,
        "frozen": ("^embedding$",),
    }


def is_smoke(args: types.SimpleNamespace) -> bool:
    """Whether a run of size tiny is asked for so few updates that it shall only be looked at."""
    return args.size == "tiny" and args.steps is not None and 0 < args.steps <= 5


def shrink_to_smoke(config: ConfigDict) -> None:
    """Makes a smoke run of a config with all its sections: it looks at everything, briefly, and compiles one update."""
    config.data.update({"held_out_per_kind": 8, "train_per_kind": 50, "train_worlds": 4})
    config.train.questions = 16
    config.objective.row_lengths = config.objective.row_lengths[-1:]
    config.train.eval_every = config.train.steps
    # References: the note has the numbers of the run, which may be changed after this.
    note = (
        f"smoke run (steps={config.train.steps}; 1 to 5 are for a look): "
        + config.train.get_ref("questions").to_str()
        + " questions an update, "
    )
    if config.data.path == "miniwiki":  # a folder holds out what it has
        note += config.data.get_ref("held_out_per_kind").to_str() + " held-out questions of each kind, "
    config.note = note + "rows of one length. Its numbers are not those of a longer run's first steps"
