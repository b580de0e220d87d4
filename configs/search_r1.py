"""Search-R1 with GRPO or PPO, one of the papers' baselines.

    python launch/sft.py --config=configs/miniwiki_cold_start.py:recipe=search_r1,init=assets/miniwiki-policy \\
      --workdir=runs/search_r1_cold_start
    python launch/train.py --config=configs/search_r1.py                            # built-in world, from that start
    python launch/train.py --config=configs/search_r1.py:algorithm=ppo              # with a critic
    python launch/train.py --config=configs/search_r1.py:reward=em                  # exact match only, as in the paper
    python launch/train.py --config=configs/search_r1.py:size=3b,data=FOLDER,policy=FOLDER,encoder=FOLDER

size=tiny is the built-in world (`miniwiki`). It uses the settings that were tuned for R-Search, a third more updates, and a
policy that was cold-started: the shipped one after SFT on 150 demonstrations.

size=3b and size=7b hold the published settings: 4 turns, top-k 3, 500 tokens per turn and per observation, a context of 4,096
tokens, batch 512, mini-batches of 256 trajectories, lr 1e-6 with a warm-up of 28.5 %, KL 0.001 (k3 in the loss for GRPO, k1 in
the reward for PPO), 5 samples per question for GRPO and one for PPO, critic at 1e-5 with a warm-up of 1.5 %, clip 0.2,
temperature 1, 500 steps. The policy is Qwen2.5-Instruct or -Base; the retriever is E5 over Wikipedia of 2018.
"""

import types
from typing import Any

from ml_collections import ConfigDict

from rrl.config.shared import (
    base_config,
    is_smoke,
    parse_run_arguments,
    set_miniwiki_training,
    shrink_to_smoke,
)


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/search_r1.py:ARG`."""
    args = parse_run_arguments(
        arg, algorithm=("grpo", "ppo"), reward=("format", "em"), prompt=("auto", "bare", "instruct")
    )
    # These modules import jax, so they are imported only after the arguments have been checked.
    from rrl.recipes.search_r1 import INSTRUCTION
    from rrl.setup.settings import with_defaults

    tiny, ppo = args.size == "tiny", args.algorithm == "ppo"
    config = base_config("search_r1", arg, args)
    config.policy = args.policy or (
        "runs/search_r1_cold_start/model" if tiny else f"models/Qwen2.5-{args.size.upper()}-Instruct"
    )
    bare = args.prompt == "bare" or (args.prompt == "auto" and tiny)
    recipe = {
        "name": "search_r1",
        "instruction": "" if bare else INSTRUCTION,
        "use_format": args.reward == "format",
    }
    if tiny:
        set_miniwiki_training(config, args, recipe)
        if not ppo:
            # The rewards of a correct and a wrong answer differ by at least 0.6. Those of two correct or two wrong answers differ
            # by at most 0.2, only through their format (`SearchR1.uninformative_spread`). Groups whose answers are all correct or
            # all wrong are left out of the update.
            config.objective.drop_spread = "auto"
    else:
        set_published(config, args, recipe)
    if ppo:
        set_critic(config, args)
    if is_smoke(args):
        shrink_to_smoke(config)
    return with_defaults(config)


def set_published(config: ConfigDict, args: types.SimpleNamespace, recipe: dict[str, Any]) -> None:
    """Set the published settings."""
    ppo = args.algorithm == "ppo"
    config.recipe = recipe
    config.recipe.environment = {"max_searches": 4, "turn_tokens": 500, "observation_tokens": 500}
    config.rollout = {
        "rows": 256,
        "context": 4096,
        "wake_threshold": 16,
        "prefill_tokens": 2048,
        "top_k": 3,  # passages per search
        "top_p": 1.0,
    }
    config.train = {
        "steps": 500 if args.steps is None else args.steps,
        "questions": 512,
        "samples": 1 if ppo else 5,
        "temperature": 1.0,
        "seed": args.seed,
        "eval_every": 50,
        "permute_rewards": args.control == "permuted",
    }
    config.objective = {
        "kl_coef": 0.001,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "minibatches": 2 if ppo else 10,
        "row_lengths": (1024, 2048, 4096),
        "microbatch_tokens": 32768,
    }
    config.optim = {"name": "adamw", "lr": 1e-6, "warmup_ratio": 0.285, "clip_norm": 1.0, "b2": 0.999}


def set_critic(config: ConfigDict, args: types.SimpleNamespace) -> None:
    """Change a GRPO config to PPO: a critic, and the KL in the reward."""
    config.objective.update({"kl_estimator": "k1", "kl_in": "reward", "whiten": True})
    config.critic_optim = {"name": "adamw", "b2": 0.999, "clip_norm": 1.0}
    if args.size != "tiny":
        config.critic = {"warmup_steps": 0, "minibatches": 2}
        config.critic_optim.update({"lr": 1e-5, "warmup_ratio": 0.015, "frozen": ()})
        return
    # As in configs/rsearch_ppo.py.
    config.critic = {"warmup_steps": min(2, config.train.steps // 4), "minibatches": 1}
    config.critic_optim.update({"lr": 3e-4, "warmup_ratio": 0.0, "frozen": ("^embedding$",)})
    config.objective.kl_coef = 0.05
    config.train.update({"questions": 128, "samples": 1})
    if args.steps is None:
        config.train.update({"steps": 54, "eval_every": 27})
