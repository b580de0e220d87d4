"""R1-Searcher with REINFORCE++: a baseline of the papers.

    python launch/sft.py --workdir=runs/r1_searcher_cold_start \\
      --config=configs/miniwiki_cold_start.py:recipe=r1_searcher,init=assets/miniwiki-policy
    python launch/train.py --config=configs/r1_searcher.py                       # built-in world, from that start: stage 2
    python launch/train.py --config=configs/r1_searcher.py:stage=1               # retrieval and form alone
    python launch/train.py --config=configs/r1_searcher.py:policy=runs/r1_searcher_tiny-stage=1/policy     # … and then stage 2
    python launch/train.py --config=configs/r1_searcher.py:size=7b,stage=1,data=FOLDER,policy=FOLDER,encoder=FOLDER

A base model starts with stage 1, whose policy is stage 2's start. The cold-started policy of the built-in world (size=tiny,
settings found for R-Search's PPO there) knows how to search, so that stage 2 is the default. A wrong form costs it half an
answer: the published two, of base models, are most of the reward's variance, and 50 updates learn nothing else
(docs/recipes.md).

size=3b and size=7b hold the published settings: at most 8 searches, top-k 3, 64 questions x 16 samples at temperature 1, updates
of 256 trajectories, lr 2e-6; stage 1 on 350 questions, stage 2 on 8,148, one epoch each. For the KL in the
reward of each token we take 0.001, as for the other recipes. The paper ran Qwen2.5-7B (base) and Llama-3.1-8B-Instruct
(prompt=instruct); the retriever is BGE-large-en-v1.5 over KILT's Wikipedia.
"""

from ml_collections import ConfigDict

from rrl.config.shared import (
    base_config,
    is_smoke,
    parse_run_arguments,
    set_miniwiki_training,
    shrink_to_smoke,
)

QUESTIONS = {1: 350, 2: 8148}
"""Of each stage: one epoch."""


def get_config(arg: str = "") -> ConfigDict:
    """The config of `--config=configs/r1_searcher.py:ARG`."""
    args = parse_run_arguments(arg, stage=(2, 1), prompt=("auto", "base", "instruct", "bare"))
    # It imports jax: after the arguments were found right.
    from rrl.train.experiment import with_defaults

    tiny = args.size == "tiny"
    config = base_config("r1_searcher", arg, args)
    config.policy = args.policy or (
        "runs/r1_searcher_cold_start/model" if tiny else f"models/Qwen2.5-{args.size.upper()}"
    )
    opening = {"auto": "bare" if tiny else "base"}.get(args.prompt, args.prompt)
    recipe = {"name": "r1_searcher", "opening": opening, "stage": args.stage}
    if tiny:
        set_miniwiki_training(config, args, recipe)
        config.objective.kl_coef = 0.05
        config.recipe.malformed_penalty = 0.5
        # No group is needed: other questions tell more than other answers to the same.
        config.train.update({"questions": 128, "samples": 1})
        if args.steps is None:
            config.train.update({"steps": 28, "eval_every": 14})
    else:
        config.recipe = recipe
        config.recipe.environment = {}
        config.rollout = {
            "rows": 256,
            "context": 16384,
            "wake_threshold": 16,
            "prefill_tokens": 2048,
            "top_k": 3,
            "top_p": 1.0,
        }
        config.train = {
            "steps": QUESTIONS[args.stage] // 64 if args.steps is None else args.steps,
            "questions": 64,
            "samples": 16,
            "temperature": 1.0,
            "seed": args.seed,
            "eval_every": 20,
            "permute_rewards": args.control == "permuted",
        }
        config.objective = {
            "kl_coef": 0.001,
            "clip_low": 0.2,
            "clip_high": 0.2,
            "minibatches": 4,
            "row_lengths": (2048, 4096, 8192, 16384),
            "microbatch_tokens": 32768,
        }
        config.optim = {"name": "adamw", "lr": 2e-6, "clip_norm": 1.0, "b2": 0.999}
    if args.stage == 2:
        # What a policy earns of which every form is wrong, as a base model's first ones may be.
        config.guard.reward = -(0.5 if tiny else 2.0)
    config.objective.update({"kl_estimator": "k1", "kl_in": "reward", "whiten": True})
    if is_smoke(args):
        shrink_to_smoke(config)
    return with_defaults(config)
