"""R-Search with GRPO, the main configuration.

    python launch/train.py --config=configs/rsearch_grpo.py                      # built-in world, 5 to 10 minutes on 2 cores
    python launch/train.py --config=configs/rsearch_grpo.py:steps=2              # smoke run, a minute or two
    python launch/train.py --config=configs/rsearch_grpo.py:data=FOLDER,policy=FOLDER    # real questions, any policy
    python launch/train.py --config=configs/rsearch_grpo.py:size=7b,data=FOLDER,policy=FOLDER,reader=FOLDER,encoder=FOLDER

size=tiny is the built-in world (`miniwiki`), starting from the shipped cold-started policy; its reader is the shipped one, of
another model family. With policy=FOLDER, the recipe card in the folder (`rrl_recipe.json`) decides about the settings. If it
states a short context, the policy was trained by rrl for the built-in world, and the settings stay the same. Any other folder is
an ordinary language model: it gets the paper's prompt, objective and optimiser, in sizes that fit a single device.

size=3b and size=7b hold the paper's settings (sections 4.1-4.3; the released values if the paper states none): Qwen2.5-Instruct
as policy, Llama-3.2-3B-Instruct as reader, E5 as encoder, 8 x 80 GB.
"""

from typing import Any

from ml_collections import ConfigDict

from rrl.config.shared import base_config, is_smoke, parse_run_arguments, shrink_to_smoke

ARGUMENTS: dict[str, Any] = {"reader": "", "prompt": ("auto", "bare", "paper")}
"""Arguments beside those of every training config."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/rsearch_grpo.py:ARG`."""
    args = parse_run_arguments(arg, **ARGUMENTS)
    # These modules import jax, so they are imported only after the arguments have been checked.
    from rrl.recipes.card import read_card
    from rrl.train.settings import with_defaults

    tiny = args.size == "tiny"
    real = args.data != "miniwiki"
    policy = args.policy or (
        "assets/miniwiki-policy" if tiny else f"models/Qwen2.5-{args.size.upper()}-Instruct"
    )
    card = read_card(policy)
    cold_started = tiny and card is not None and 0 < card.context <= 1024

    def sized(small: Any, single_device: Any, paper: Any) -> Any:
        """Choose the value for a small cold-started policy, for another model with size=tiny, or for size=3b and 7b."""
        return small if cold_started else single_device if tiny else paper

    config = base_config("rsearch_grpo", arg, args)
    config.policy = policy
    config.reader = args.reader or ("assets/miniwiki-reader" if tiny else "models/Llama-3.2-3B-Instruct")

    # A policy too small to follow instructions was cold-started on the bare question, which its card states.
    config.recipe = {"name": "rsearch"}
    if args.prompt == "bare":
        config.recipe.instruction = ""
    elif args.prompt == "auto" and card is not None and "instruction" in card.fields:
        config.recipe.instruction = card.fields["instruction"]
    if cold_started:  # the shipped reader is wrong for two of five questions, so its reward is noisy
        config.recipe.reader_weight = 0.3
    config.recipe.environment = {
        "max_searches": 4,
        "turn_tokens": sized(128, 256, 500),
        "observation_tokens": sized(256, 1000, 1800),
    }
    if cold_started:  # it has seen no corrections, and they never led it to a correct answer
        config.recipe.environment.correction = ""
    config.rollout = {
        "rows": sized(64, 16, 256),
        "oversubscribed_slots": sized(32, 0, 0),  # these trajectories decode while others wait for passages
        "context": sized(1024, 4096, 8192),
        "wake_threshold": 16,
        "prefill_tokens": sized(256, 1024, 2048),
        # Samples of this policy are similar to each other and copy passages, so draft tokens are often accepted.
        "draft_tokens": sized(1, 0, 0),
        # Fixed, so that the result is bitwise the same on any number of cores.
        "workers": 2 if cold_started else 0,
        "top_k": 2 if cold_started else 3,
        "top_p": 0.95,
    }
    config.reader_rollout = {
        "rows": 32 if tiny else 128,
        "context": 384 if tiny else 4096,
        "prefill_tokens": 512 if tiny else 2048,
        "workers": 2 if cold_started else 0,
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
        # Averaging reduces the noise, which is as large as the gain of a run.
        "average_last": 0.5 if cold_started else 0.0,
        "permute_rewards": args.control == "permuted",
    }
    config.objective = {
        # Without a KL, gradient noise changes the policy more than the reward does, above all in the decision that occurs in
        # every question: stop or search again.
        "kl_coef": 0.1 if cold_started else 0.001,
        "clip_low": 0.2,
        "clip_high": 0.28 if cold_started else 0.2,
        # Groups whose answers are all correct or all wrong differ only by format and reader rewards, by at most
        # `RSearch.uninformative_spread`. They would take a third of the update's time and add a third of its noise.
        "drop_spread": "auto" if cold_started and not real else None,
        "row_lengths": sized((1024,), (1024, 2048, 4096), (1024, 2048, 4096, 8192)),
        "microbatch_tokens": sized(2048, 8192, 32768),
        "parallel_microbatches": sized(2, 1, 1),
    }
    config.optim = {
        "name": "adamw",
        "lr": 3e-4 if cold_started else 1e-6,
        "warmup_ratio": 0.3 if cold_started else 0.95,
        "weight_decay": 0.0,
        "clip_norm": 1.0,
        "schedule": "linear" if cold_started else "constant",
        # Adam moves each parameter by about lr even on pure noise: a slow second moment and fewer parameters reduce that.
        "b2": 0.999,
        "frozen": ("^embedding$",) if cold_started else (),
    }
    if is_smoke(args):
        shrink_to_smoke(config)
    elif tiny and not args.policy and not real and args.control == "none":
        # Result of the same policy after SFT on 4,000 demonstrations: docs/recipes.md, "R-Search".
        config.reference = ("SFT on 4,000 clean demonstrations", 0.733)
    return with_defaults(config)
