"""R-Search with GRPO.

    python launch/train.py --config=configs/rsearch_grpo.py                      # built-in world, 5 to 10 minutes on 2 cores
    python launch/train.py --config=configs/rsearch_grpo.py:steps=2              # smoke run, a minute or two
    python launch/train.py --config=configs/rsearch_grpo.py:data=FOLDER,policy=FOLDER    # real questions, any policy
    python launch/train.py --config=configs/rsearch_grpo.py:size=7b,data=FOLDER,policy=FOLDER,reader=FOLDER,encoder=FOLDER

size=tiny is the built-in world (`miniwiki`) from the shipped cold-started policy; its reader is the shipped one of
another family. With policy=FOLDER it keeps these settings where the folder's recipe card (`rrl_recipe.json`: rrl trained
it) tells of a short context; any other folder is an ordinary language model, and gets the paper's prompt, objective and
optimiser in sizes that a single device has room for. size=3b and size=7b hold the settings of the paper (sections
4.1-4.3, released values where it is silent): Qwen2.5-Instruct folders as policy, Llama-3.2-3B-Instruct as reader, E5 as
encoder, 8 x 80 GB.
"""

from typing import Any

from ml_collections import ConfigDict

from rrl.config.shared import base_config, is_smoke, parse_run_arguments, shrink_to_smoke

ARGUMENTS: dict[str, Any] = {"reader": "", "prompt": ("auto", "bare", "paper")}
"""Those beside the arguments of every run."""


def get_config(arg: str = "") -> ConfigDict:
    """The config of `--config=configs/rsearch_grpo.py:ARG`."""
    args = parse_run_arguments(arg, **ARGUMENTS)
    # They import jax: after the arguments were found right.
    from rrl.recipes.card import read_card
    from rrl.train.experiment import with_defaults

    tiny = args.size == "tiny"
    real = args.data != "miniwiki"
    policy = args.policy or (
        "assets/miniwiki-policy" if tiny else f"models/Qwen2.5-{args.size.upper()}-Instruct"
    )
    card = read_card(policy)
    ours = tiny and card is not None and 0 < card.context <= 1024

    def sized(cold_started: Any, ordinary: Any, paper: Any) -> Any:
        return cold_started if ours else ordinary if tiny else paper

    config = base_config("rsearch_grpo", arg, args)
    config.policy = policy
    config.reader = args.reader or ("assets/miniwiki-reader" if tiny else "models/Llama-3.2-3B-Instruct")

    # A policy too small to follow instructions is cold-started on the bare question; its card says so.
    config.recipe = {"name": "rsearch"}
    if args.prompt == "bare":
        config.recipe.instruction = ""
    elif args.prompt == "auto" and card is not None and "instruction" in card.fields:
        config.recipe.instruction = card.fields["instruction"]
    if ours:  # the shipped reader errs in two of five: noise, beside the answer's reward
        config.recipe.reader_weight = 0.3
    config.recipe.environment = {
        "max_searches": 4,
        "turn_tokens": sized(128, 256, 500),
        "observation_tokens": sized(256, 1000, 1800),
    }
    if ours:  # it was never shown a correction, and none has brought it to a right answer
        config.recipe.environment.correction = ""
    config.rollout = {
        "rows": sized(64, 16, 256),
        "oversubscribed_slots": sized(32, 0, 0),  # while some wait for passages
        "context": sized(1024, 4096, 8192),
        "wake_threshold": 16,
        "prefill_tokens": sized(256, 1024, 2048),
        "draft_tokens": sized(1, 0, 0),  # its samples write much alike, and copy
        "workers": 2 if ours else 0,  # not as many as there are cores: the same bits on one as on many
        "top_k": 2 if ours else 3,
        "top_p": 0.95,
    }
    config.reader_rollout = {
        "rows": 32 if tiny else 128,
        "context": 384 if tiny else 4096,
        "prefill_tokens": 512 if tiny else 2048,
        "workers": 2 if ours else 0,
    }
    steps = args.steps if args.steps is not None else (66 if tiny else 195)
    config.train = {
        "steps": steps,
        "questions": 32 if tiny else 256,
        "samples": 4 if tiny else 5,
        "temperature": 1.0,
        "seed": args.seed,
        "eval_every": max(1, steps // 2) if tiny else 20,
        "eval_temperature": 0.0 if tiny else 0.1,
        "average_last": 0.5 if ours else 0.0,  # one run's noise is as large as its gain
        "permute_rewards": args.control == "permuted",
    }
    config.objective = {
        # Without a pull towards the start, noise moves what all questions share (stop or search on) further than rewards do.
        "kl_coef": 0.1 if ours else 0.001,
        "clip_low": 0.2,
        "clip_high": 0.28 if ours else 0.2,
        # Groups whose answers are all right or all wrong differ by format and reader alone, at most by 0.7: a third of the
        # update's time and of its noise.
        "drop_spread": 0.7 if ours and not real else None,
        "row_lengths": sized((1024,), (1024, 2048, 4096), (1024, 2048, 4096, 8192)),
        "microbatch_tokens": sized(2048, 8192, 32768),
        "parallel_microbatches": sized(2, 1, 1),
    }
    config.optim = {
        "name": "adamw",
        "lr": 3e-4 if ours else 1e-6,
        "warmup_ratio": 0.3 if ours else 0.95,
        "weight_decay": 0.0,
        "clip_norm": 1.0,
        "schedule": "linear" if ours else "constant",
        # Adam moves every parameter by about lr, noise or not: a slow second moment and fewer parameters keep it quiet.
        "b2": 0.999,
        "frozen": ("^embedding$",) if ours else (),
    }
    if is_smoke(args):
        shrink_to_smoke(config)
    elif tiny and not args.policy and not real and args.control == "none":
        # What the same policy reaches when it is shown 4,000 demonstrations: docs/recipes.md, "R-Search".
        config.reference = ("SFT on 4,000 clean demonstrations", 0.733)
    return with_defaults(config)
