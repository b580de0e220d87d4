"""R1-Searcher with REINFORCE++, one of the papers' baselines.

    python launch/sft.py --workdir=runs/r1_searcher_cold_start \\
      --config=configs/miniwiki_cold_start.py:recipe=r1_searcher,init=assets/miniwiki-policy
    python launch/train.py --config=configs/r1_searcher.py                       # built-in world, from that start: stage 2
    python launch/train.py --config=configs/r1_searcher.py:stage=1               # rewards for retrieval and format only
    python launch/train.py --config=configs/r1_searcher.py:policy=runs/r1_searcher_tiny-stage=1/policy     # then stage 2
    python launch/train.py --config=configs/r1_searcher.py:size=7b,stage=1,data=FOLDER,policy=FOLDER,encoder=FOLDER

A base model starts with stage 1, and the resulting policy is the start of stage 2. In the built-in world (size=tiny) the
cold-started policy already knows how to search, so stage 2 is the default. size=tiny uses the settings that were tuned for
R-Search's PPO (configs/rsearch_ppo.py). The penalty of a malformed trajectory is 0.5, half the reward of a correct answer. The
published penalty of 2, for base models, would dominate the variance of the reward, and 50 updates would learn nothing but the
format (docs/recipes.md).

size=3b and size=7b hold the published settings: at most 8 searches, top-k 3, 64 questions x 16 samples at temperature 1, updates
of 256 trajectories, lr 2e-6; one epoch each over 350 questions (stage 1) and 8,148 questions (stage 2). The weight of the
per-token KL in the reward is not published; it is 0.001, as for the other recipes. The paper ran Qwen2.5-7B (base) and
Llama-3.1-8B-Instruct (prompt=instruct). Its retriever is BGE-large-en-v1.5 over KILT's Wikipedia.
"""

from typing import Any

from ml_collections import ConfigDict

from rrl.config.shared import (
    base_config,
    is_smoke,
    parse_run_arguments,
    set_miniwiki_training,
    shrink_to_smoke,
)

QUESTIONS = {1: 350, 2: 8148}
"""Stage -> number of training questions; one epoch over them."""


PUBLISHED: dict[str, dict[str, Any]] = {
    "rollout": {
        "rows": 256,
        "context": 16384,
        "wake_threshold": 16,
        "prefill_tokens": 2048,
        "top_k": 3,  # passages per search
        "top_p": 1.0,
    },
    "train": {"questions": 64, "samples": 16, "temperature": 1.0, "eval_every": 20},
    "objective": {
        "kl_coef": 0.001,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "minibatches": 4,
        "row_lengths": (2048, 4096, 8192, 16384),
        "microbatch_tokens": 32768,
    },
    "optim": {"name": "adamw", "lr": 2e-6, "clip_norm": 1.0, "b2": 0.999},
}
"""Sections with the paper's settings, for size=3b and size=7b."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/r1_searcher.py:ARG`."""
    args = parse_run_arguments(arg, stage=(2, 1), prompt=("auto", "base", "instruct", "bare"))
    # This module imports jax, so it is imported only after the arguments have been checked.
    from rrl.setup.settings import with_defaults

    tiny = args.size == "tiny"
    config = base_config("r1_searcher", arg, args)
    config.policy = args.policy or (
        "runs/r1_searcher_cold_start/model" if tiny else f"models/Qwen2.5-{args.size.upper()}"
    )
    opening = args.prompt
    if opening == "auto":
        opening = "bare" if tiny else "base"
    recipe = {"name": "r1_searcher", "opening": opening, "stage": args.stage}
    if tiny:
        set_miniwiki_training(config, args, recipe)
        config.objective.kl_coef = 0.05
        config.recipe.malformed_penalty = 0.5
        # REINFORCE++ needs no groups: more questions are more informative than more samples of one question.
        config.train.update({"questions": 128, "samples": 1})
        if args.steps is None:
            config.train.update({"steps": 28, "eval_every": 14})
    else:
        config.recipe = recipe | {"environment": {}}
        config.update(PUBLISHED)
        config.train.steps = QUESTIONS[args.stage] // 64 if args.steps is None else args.steps
        config.train.update({"seed": args.seed, "permute_rewards": args.control == "permuted"})
    config.objective.update({"kl_estimator": "k1", "kl_in": "reward", "whiten": True})
    if is_smoke(args):
        shrink_to_smoke(config)
    return with_defaults(config)
