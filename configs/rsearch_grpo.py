"""R-Search with GRPO, the main configuration.

    python launch/train.py --config=configs/rsearch_grpo.py                      # built-in world, 5 to 10 minutes on 2 cores
    python launch/train.py --config=configs/rsearch_grpo.py:steps=2              # smoke run, a minute or two
    python launch/train.py --config=configs/rsearch_grpo.py:data=FOLDER,policy=FOLDER    # real questions, any policy
    python launch/train.py --config=configs/rsearch_grpo.py:size=7b,data=FOLDER,policy=FOLDER,reader=FOLDER,encoder=FOLDER

size=tiny starts from the shipped cold-started policy of the built-in world (`miniwiki`); its reader is the shipped one, of
another model family. With policy=FOLDER, the recipe card in the folder (`rrl_recipe.json`) decides about the settings. If it
states a short context, the policy was trained by rrl for the built-in world, and the settings stay the same (`COLD_STARTED`).
Any other folder is an ordinary language model: it gets the paper's prompt, objective and optimiser (`PUBLISHED`), in sizes that
fit a single device (`SINGLE_DEVICE`).

size=3b and size=7b hold the paper's settings (sections 4.1-4.3; the released values if the paper states none): Qwen2.5-Instruct
as policy, Llama-3.2-3B-Instruct as reader, E5 as encoder, 8 x 80 GB.
"""

from typing import Any

from ml_collections import ConfigDict

from rrl.config.shared import (
    MINIWIKI_ENVIRONMENT,
    MINIWIKI_OBJECTIVE,
    MINIWIKI_OPTIM,
    MINIWIKI_ROLLOUT,
    MINIWIKI_TRAIN,
    base_config,
    is_smoke,
    parse_run_arguments,
    shrink_to_smoke,
)

ARGUMENTS: dict[str, Any] = {"reader": "", "prompt": ("auto", "bare", "paper")}
"""Arguments beside those of every training config, with their defaults. A tuple lists the allowed values, the default first."""

PUBLISHED: dict[str, dict[str, Any]] = {
    "recipe": {"environment": {"max_searches": 4, "turn_tokens": 500, "observation_tokens": 1800}},
    "rollout": {
        "rows": 256,
        "oversubscribed_slots": 0,
        "context": 8192,
        "wake_threshold": 16,
        "prefill_tokens": 2048,
        "draft_tokens": 0,
        "workers": 0,
        "top_k": 3,  # passages per search
        "top_p": 0.95,
    },
    "reader_rollout": {"rows": 128, "context": 4096, "prefill_tokens": 2048, "workers": 0},
    "train": {
        "steps": 195,
        "questions": 256,
        "samples": 5,
        "temperature": 1.0,
        "eval_every": 20,
        "eval_temperature": 0.1,
        "average_last": 0.0,
    },
    "objective": {
        "kl_coef": 0.001,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "row_lengths": (1024, 2048, 4096, 8192),
        "microbatch_tokens": 32768,
        "parallel_microbatches": 1,
    },
    "optim": {
        "name": "adamw",
        "lr": 1e-6,
        "warmup_ratio": 0.95,  # not a typing error: the warm-up takes almost the whole run
        "weight_decay": 0.0,
        "clip_norm": 1.0,
        "schedule": "constant",
        "b2": 0.999,
        "frozen": (),
    },
}
"""Sections with the paper's settings, for size=3b and size=7b; with `SINGLE_DEVICE` also for size=tiny."""

SINGLE_DEVICE: dict[str, dict[str, Any]] = {
    "recipe": {"environment": {"turn_tokens": 256, "observation_tokens": 1000}},
    "rollout": {"rows": 16, "context": 4096, "prefill_tokens": 1024},
    "reader_rollout": {"rows": 32, "context": 384, "prefill_tokens": 512},
    "train": {"steps": 66, "questions": 32, "samples": 4, "eval_temperature": 0.0},
    "objective": {"row_lengths": (1024, 2048, 4096), "microbatch_tokens": 8192},
}
"""Changes to `PUBLISHED` for size=tiny with an ordinary language model."""

COLD_STARTED: dict[str, dict[str, Any]] = {
    "recipe": {
        "reader_weight": 0.3,  # the shipped reader is wrong for two of five questions, so its reward is noisy
        # No correction: the demonstrations have none, and the policy never answered rightly after one.
        "environment": MINIWIKI_ENVIRONMENT | {"correction": ""},
    },
    "rollout": MINIWIKI_ROLLOUT
    | {"workers": 2},  # fixed, so that the result is bitwise the same on any number of cores
    "reader_rollout": {"rows": 32, "context": 384, "prefill_tokens": 512, "workers": 2},
    "train": MINIWIKI_TRAIN | {"steps": 66},
    "objective": MINIWIKI_OBJECTIVE,
    "optim": MINIWIKI_OPTIM,
}
"""Sections for size=tiny with a cold-started policy of the built-in world."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/rsearch_grpo.py:ARG`."""
    args = parse_run_arguments(arg, **ARGUMENTS)
    # These modules import jax, so they are imported only after the arguments have been checked.
    from rrl.recipes.card import read_card
    from rrl.setup.settings import with_defaults

    tiny = args.size == "tiny"
    real = args.data != "miniwiki"
    policy = args.policy or (
        "assets/miniwiki-policy" if tiny else f"models/Qwen2.5-{args.size.upper()}-Instruct"
    )
    card = read_card(policy)
    cold_started = tiny and card is not None and 0 < card.context <= 1024

    config = base_config("rsearch_grpo", arg, args)
    config.policy = policy
    config.reader = args.reader or ("assets/miniwiki-reader" if tiny else "models/Llama-3.2-3B-Instruct")

    config.recipe = {"name": "rsearch"}
    # A policy too small to follow instructions was cold-started on the bare question, which its card states.
    if args.prompt == "bare":
        config.recipe.instruction = ""
    elif args.prompt == "auto" and card is not None and "instruction" in card.fields:
        config.recipe.instruction = card.fields["instruction"]

    config.update(COLD_STARTED if cold_started else PUBLISHED)
    if tiny and not cold_started:
        config.update(SINGLE_DEVICE)
    if args.steps is not None:
        config.train.steps = args.steps
    if tiny:
        config.train.eval_every = max(1, config.train.steps // 2)
    config.train.update({"seed": args.seed, "permute_rewards": args.control == "permuted"})
    # Groups whose answers are all correct or all wrong differ only by format and reader rewards, by at most
    # `RSearch.uninformative_spread`. They are left out of the update: they would take a third of its time and add a third of its
    # noise.
    config.objective.drop_spread = "auto" if cold_started and not real else None

    if is_smoke(args):
        shrink_to_smoke(config)
    elif tiny and not args.policy and not real and args.control == "none":
        # Result of the same policy after SFT on 4,000 demonstrations: docs/recipes.md, "R-Search".
        config.reference = ("SFT on 4,000 clean demonstrations", 0.733)
    return with_defaults(config)
