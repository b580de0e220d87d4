"""ReSearch with GRPO, one of the papers' baselines.

    python launch/sft.py --config=configs/miniwiki_cold_start.py:recipe=research,init=assets/miniwiki-policy \\
      --workdir=runs/research_cold_start
    python launch/train.py --config=configs/research_grpo.py                            # built-in world, from that start
    python launch/train.py --config=configs/research_grpo.py:size=7b,data=FOLDER,policy=FOLDER,encoder=FOLDER

size=tiny is the built-in world (`miniwiki`). It uses the settings that were tuned for R-Search, a third more updates, and a
policy that was cold-started: the shipped one after SFT on 100 demonstrations. The lengths of a turn and of an observation and
the number of searches are limited, since the policy's context has 1,024 tokens.

size=3b and size=7b hold the paper's settings (section 3.1, Table 4): a total length of 8,192 tokens, top-k 5, batch 256, 5
rollouts at temperature 1, lr 1e-6, KL 0.001, clip 0.2, two epochs over MuSiQue's 19,938 questions. The paper ran 7B and 32B
on 64 H800; its retriever is E5-base-v2 over Wikipedia of 2018.
"""

from ml_collections import ConfigDict

from rrl.config.shared import (
    base_config,
    is_smoke,
    parse_run_arguments,
    set_miniwiki_training,
    shrink_to_smoke,
)


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/research_grpo.py:ARG`."""
    args = parse_run_arguments(arg, prompt=("auto", "instruct", "base", "bare"))
    # This module imports jax, so it is imported only after the arguments have been checked.
    from rrl.setup.settings import with_defaults

    tiny = args.size == "tiny"
    config = base_config("research_grpo", arg, args)
    config.policy = args.policy or (
        "runs/research_cold_start/model" if tiny else f"models/Qwen2.5-{args.size.upper()}-Instruct"
    )
    opening = args.prompt
    if opening == "auto":
        opening = "bare" if tiny else "instruct"
    recipe = {"name": "research", "opening": opening}
    if tiny:
        set_miniwiki_training(config, args, recipe)
        # Groups whose answers are all correct, or all have F1 0, differ only by format; they are left out of the update.
        config.objective.drop_spread = "auto"
    else:
        config.recipe = recipe
        config.recipe.environment = {}
        config.rollout = {
            "rows": 256,
            "context": 8192,
            "wake_threshold": 16,
            "prefill_tokens": 2048,
            "top_k": 5,  # passages per search
            "top_p": 1.0,
        }
        config.train = {
            "steps": 2 * 19938 // 256 if args.steps is None else args.steps,
            "questions": 256,
            "samples": 5,
            "temperature": 1.0,
            "seed": args.seed,
            "eval_every": 20,
            "permute_rewards": args.control == "permuted",
        }
        config.objective = {
            "kl_coef": 0.001,
            "clip_low": 0.2,
            "clip_high": 0.2,
            "row_lengths": (1024, 2048, 4096, 8192),
            "microbatch_tokens": 32768,
        }
        config.optim = {"name": "adamw", "lr": 1e-6, "clip_norm": 1.0, "b2": 0.999}
    if is_smoke(args):
        shrink_to_smoke(config)
    return with_defaults(config)
