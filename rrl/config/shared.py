"""Parts that the training configs of all recipes share: arguments, data, retriever, devices and smoke runs.

This module does not import jax, so that a wrong argument is reported at once. Read `base_config` first.
"""

import types
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from rrl.config.arguments import parse, run_name
from rrl.errors import UserError

TENSOR_PARALLEL = {"tiny": 1, "3b": 2, "7b": 4}
"""Devices on the tensor axis, by model size: the number of key-value heads (2 in Qwen2.5-3B, 4 in 7B), so that each device
holds one head and no KV cache is replicated."""
MINIWIKI_ENVIRONMENT: dict[str, Any] = {"max_searches": 4, "turn_tokens": 128, "observation_tokens": 256}
"""Limits of an episode with one growing context, for a cold-started policy of the built-in world."""
MINIWIKI_ROLLOUT: dict[str, Any] = {
    "rows": 64,
    "oversubscribed_slots": 32,  # these trajectories decode while others wait for passages
    "context": 1024,
    "wake_threshold": 16,
    "prefill_tokens": 256,
    # Samples of these policies are similar to each other and copy passages, so draft tokens are often accepted.
    "draft_tokens": 1,
    "top_k": 2,  # passages per search
    "top_p": 0.95,
}
"""The rollout of such policies."""
MINIWIKI_TRAIN: dict[str, Any] = {
    "questions": 32,
    "samples": 4,
    "temperature": 1.0,
    "eval_temperature": 0.0,
    # The final parameters are the mean over the last half of the updates. This reduces the noise of the result, which is as
    # large as the gain of a run.
    "average_last": 0.5,
}
"""Batches and evaluation of such policies."""
MINIWIKI_OBJECTIVE: dict[str, Any] = {
    # Without a KL, gradient noise changes the policy more than the reward does, above all in the decision that occurs in every
    # question: stop or search again.
    "kl_coef": 0.1,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "row_lengths": (1024,),
    "microbatch_tokens": 2048,
    "parallel_microbatches": 2,
}
"""The objective of such policies."""
MINIWIKI_OPTIM: dict[str, Any] = {
    "name": "adamw",
    "lr": 3e-4,
    "warmup_ratio": 0.3,
    "weight_decay": 0.0,
    "clip_norm": 1.0,
    "schedule": "linear",
    # Adam moves each parameter by about lr even on pure noise: a slow second moment and fewer parameters reduce that.
    "b2": 0.999,
    "frozen": ("^embedding$",),
}
"""The optimiser of such policies."""
READING_OPTIM: dict[str, Any] = {
    "name": "muon",
    "lr": 6e-3,
    "adam_lr": 3e-3,
    "schedule": "linear",
    "warmup_steps": 20,
    "b2": 0.95,
}
"""The optimiser that trains models of the built-in world to read, from random parameters."""
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
"""The arguments of every config that trains a recipe, in the form of `rrl.config.arguments.parse`.

- size: size of the policy.
- steps: number of updates; 0 only evaluates; None: the config's own number.
- seed: seed of the training.
- data: "miniwiki" (the built-in world: a generated encyclopedia of random facts, and questions about it), or a folder.
- policy: folder of the initial policy; "": the config's own.
- encoder: folder of the text encoder; "": the shipped one in the built-in world, none for a folder.
- retriever: kind of the retriever; "": scann, or bm25 for a folder without an encoder.
- control: a negative control, that is a run whose evaluation score should not improve. "permuted" gives each trajectory of a
  batch the reward of a random one; with "search_off" every search returns nothing.
"""


def parse_run_arguments(arg: str, **more: Any) -> types.SimpleNamespace:
    """Parse the arguments of a training config: `RUN_ARGUMENTS`, and those that the config declares in `more` (see `parse`).

    Raises UserError for a wrong argument.
    """
    args = parse(arg, **RUN_ARGUMENTS, **more)
    if args.steps is not None and args.steps < 0:
        raise UserError(f"config argument steps={args.steps} must be at least 0; 0 only evaluates")
    refuse_unused_encoder(args)
    return args


def refuse_unused_encoder(args: types.SimpleNamespace) -> None:
    """Raise UserError if `encoder` is given with the retriever bm25, which does not use one."""
    if args.encoder and args.retriever == "bm25":
        raise UserError(
            f"config argument encoder={args.encoder!r} has no meaning with retriever=bm25, which searches by words; leave one out"
        )


def refuse_unused_with_ablation(args: types.SimpleNamespace, ablation: str, **defaults: str) -> None:
    """Raise UserError if the user sets an argument that has no effect in the chosen ablation.

    Args:
        args: parsed arguments, among them `ablation`.
        ablation: the ablation; nothing is checked if `args.ablation` is another one.
        **defaults: name and default of each argument that has no effect in this ablation. A value that is not the default
            is refused.
    """
    for name, value in defaults.items():
        if args.ablation == ablation and (given := getattr(args, name)) != value:
            raise UserError(
                f"config argument {name}={given} has no meaning with ablation={ablation}, which removes the part "
                "that it configures; leave one out"
            )


def base_config(stem: str, arg: str, args: types.SimpleNamespace) -> ConfigDict:
    """Return a config with its name and the sections that all recipes have: data, retriever, mesh, compute, lora and guard.

    `reader` and `reader_rollout` are empty; the configs of recipes with a reader set them.

    Args:
        stem: name of the config file, without its ending.
        arg: the config's arguments as the user wrote them. They become part of the run's name and thus of its workdir, because
            a workdir belongs to one config: a smoke run gets another workdir than the main run.
        args: the same arguments, parsed by `parse_run_arguments`.
    """
    tiny, real_data = args.size == "tiny", args.data != "miniwiki"
    kind = args.retriever or ("bm25" if real_data and not args.encoder else "scann")
    config = ConfigDict()
    config.name = run_name(f"{stem}_{args.size}", arg)
    config.reader = ""
    config.reader_rollout = {}
    config.data = {
        "path": args.data,
        "seed": 1,
        "held_out_split": "test",  # settings are tuned on "dev", which has other facts and names
        "on_error": "refuse",
        "held_out": 100 if tiny else 500,
    }
    config.retriever = {
        "kind": "off" if args.control == "search_off" else kind,
        "encoder": args.encoder or ("assets/miniwiki-encoder" if not real_data else ""),
        "title_weight": 1 if real_data else 3,
    }
    config.mesh = {"fsdp": 1 if tiny else -1, "tensor": TENSOR_PARALLEL[args.size]}
    config.compute = {"dtype": "float32" if tiny else "auto", "remat": "none" if tiny else "full"}
    # With a rank above 0 only the LoRA parameters are trained; policy and reference share all other parameters.
    config.lora = {"rank": 0}
    # Warns if reward or entropy stay at zero or the KL diverges; action=stop ends the run at its last good checkpoint.
    config.guard = {"action": "warn", "steps": 10}
    return config


def set_miniwiki_training(config: ConfigDict, args: types.SimpleNamespace, recipe: Mapping[str, Any]) -> None:
    """Set the sections recipe, rollout, train, objective and optim to values tuned for R-Search in the built-in world.

    They were tuned for R-Search's cold-started policy (docs/recipes.md, "R-Search"). Other recipes use them and change what
    their own objective needs. `recipe` holds the recipe's name and fields.
    """
    config.recipe = dict(recipe)
    # No correction: a turn with neither a search nor an answer ends the episode. The cold-start data have no message after such a
    # turn.
    config.recipe.environment = MINIWIKI_ENVIRONMENT | {"correction": ""}
    config.rollout = dict(MINIWIKI_ROLLOUT)
    # A third more than R-Search's 66 steps, because many groups have equal rewards and give no gradient.
    steps = 90 if args.steps is None else args.steps
    config.train = MINIWIKI_TRAIN | {
        "steps": steps,
        "seed": args.seed,
        "eval_every": max(1, steps // 2),
        "permute_rewards": args.control == "permuted",
    }
    config.objective = dict(MINIWIKI_OBJECTIVE)
    config.optim = dict(MINIWIKI_OPTIM)


def is_smoke(args: types.SimpleNamespace) -> bool:
    """Return whether this is a smoke run: the tiny size with 1 to 5 updates."""
    return args.size == "tiny" and args.steps is not None and 0 < args.steps <= 5


def shrink_to_smoke(config: ConfigDict) -> None:
    """Reduce a complete config, in place, to a smoke run: it runs every part briefly and compiles one update program."""
    config.data.update({"held_out_per_kind": 8, "train_per_kind": 50, "train_worlds": 4})
    config.train.questions = 16
    config.objective.row_lengths = config.objective.row_lengths[-1:]
    config.train.eval_every = config.train.steps
    # Field references: the note shows the final values of fields that are overridden after this call.
    note = (
        f"smoke run (steps={config.train.steps}, between 1 and 5): "
        + config.train.get_ref("questions").to_str()
        + " questions per update, "
    )
    if config.data.path == "miniwiki":  # a folder has its own held-out questions
        note += config.data.get_ref("held_out_per_kind").to_str() + " held-out questions of each kind, "
    config.note = note + "rows of one length. Its numbers differ from the first steps of a longer run"
