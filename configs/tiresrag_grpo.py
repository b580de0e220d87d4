"""TIRESRAG-R1 with GRPO or REINFORCE++.

    python launch/sft.py --config=configs/miniwiki_cold_start.py:recipe=tiresrag,init=assets/miniwiki-policy \\
      --workdir=runs/tiresrag_cold_start
    python launch/train.py --config=configs/tiresrag_grpo.py                              # built-in world, from that start
    python launch/train.py --config=configs/tiresrag_grpo.py:ablation=filter              # Table 7: without the filter
    python launch/train.py --config=configs/tiresrag_grpo.py:estimator=reinforce_pp       # Table 4
    python launch/train.py --config=configs/tiresrag_grpo.py:schedule=linear              # appendix G.2
    python launch/train.py --config=configs/tiresrag_grpo.py:size=3b,data=FOLDER,policy=FOLDER,judge=FOLDER,encoder=FOLDER

size=tiny is the built-in world (`miniwiki`), whose oracle knows the gold passages. It uses the settings that were tuned for
R-Search. Expected result: 60 updates, about ten minutes on two slow cores, gain 6 points; 100 updates gain 11 (docs/recipes.md).

size=3b and size=7b hold the paper's settings (appendix C.1): 108 questions x 5 rollouts at temperature 1, 2 passes over a
batch, clip 0.2, no KL, lr 2e-6 with cosine decay, top-k 5, one epoch over its 8,148 questions. The paper ran 3B on 3 H200 and
reaches EM 41.0 on HotpotQA, 52.8 on 2Wiki, 19.4 on MuSiQue, 44.0 on Bamboogle (Table 3); it did not run 7B. Values that the
paper does not state are those of the released code: top-p 0.95, a warm-up of 1.5 %, 1,024 tokens per prompt and 15,000 per
trajectory.

Arguments for comparisons: `ablation` is a row of Table 7. `estimator` is one of Table 4. `schedule` sets how the weight of the
auxiliary rewards falls (appendices E and G.2). `reflect=released` takes the reflection reward of the released code instead of
Eq. 4. `prompt` is that of Figure 9 ("instruct"), of Figure 10 ("base"), or the question alone ("bare").

`judge` is "oracle" (data with gold passages), the folder of a model (the paper: Qwen3-8B), or the http address of an
OpenAI-compatible service, with its `judge_model`. The service's key is read from OPENAI_API_KEY.
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
    refuse_unused_with_ablation,
    shrink_to_smoke,
)

MINIWIKI: dict[str, dict[str, Any]] = {
    "recipe": {"environment": MINIWIKI_ENVIRONMENT},
    "rollout": MINIWIKI_ROLLOUT
    | {"workers": 2},  # fixed, so that the result is bitwise the same on any number of cores
    "train": MINIWIKI_TRAIN | {"steps": 60},
    "objective": MINIWIKI_OBJECTIVE
    | {
        "epochs": 1,
        "aggregation": "token_mean",  # the expected results were measured with it
        "constant_tokens": 1,
    },
    "optim": MINIWIKI_OPTIM,
}
"""Sections for size=tiny."""

PUBLISHED: dict[str, dict[str, Any]] = {
    "recipe": {"environment": {"max_searches": 8, "turn_tokens": 512, "observation_tokens": 1800}},
    "rollout": {
        "rows": 64,
        "oversubscribed_slots": 0,
        "context": 16384,
        "wake_threshold": 16,
        "prefill_tokens": 2048,
        "draft_tokens": 0,
        "workers": 0,
        "top_k": 5,  # passages per search
        "top_p": 0.95,
    },
    "train": {
        "steps": 75,
        "questions": 108,
        "samples": 5,
        "temperature": 1.0,
        "eval_every": 20,
        "eval_temperature": 0.0,
        "average_last": 0.0,
    },
    "objective": {
        "kl_coef": 0.0,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "epochs": 2,
        # The sum over tokens (section 4.2): each sequence's sum is divided by 1.
        "aggregation": "constant",
        "constant_tokens": 1,
        "row_lengths": (2048, 4096, 8192, 16384),
        "microbatch_tokens": 32768,
        "parallel_microbatches": 1,
    },
    "optim": {
        "name": "adamw",
        "lr": 2e-6,
        "warmup_ratio": 0.015,
        "weight_decay": 0.0,
        "clip_norm": 1.0,
        "schedule": "cosine",
        "b2": 0.999,
        "frozen": (),
    },
}
"""Sections with the paper's settings, for size=3b and size=7b."""

ABLATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "filter": {"use_filter": False},
    "difficulty": {"use_difficulty": False},
    "penalty": {"penalty_weight": 0.0},
    "reflect": {"reflect_weight": 0.0},
    "sufficient": {"sufficient_weight": 0.0},
    "thinking": {"thinking_weight": 0.0},
}
"""Row of Table 7 -> the fields that leave this part out. "sufficient" and "thinking" remove the reward
from the sum (Eq. 5). The difficulty weight and the penalty still use the judge: Table 7 has separate rows for
them."""
ABLATIONS["naive"] = {name: value for fields in ABLATIONS.values() for name, value in fields.items()}
"""The first row of Table 7: all parts are left out, and the reward is the answer's F1."""

ARGUMENTS: dict[str, Any] = {
    "judge": "",
    "judge_model": "",
    "prompt": ("auto", "instruct", "base", "bare"),
    "ablation": tuple(ABLATIONS),
    "estimator": ("grpo", "reinforce_pp"),
    "schedule": ("paper", "fixed", "linear", "fast"),
    "reflect": ("paper", "released"),
}
"""Arguments beside those of every training config, with their defaults. A tuple lists the allowed values, the default first."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/tiresrag_grpo.py:ARG`."""
    args = parse_run_arguments(arg, **ARGUMENTS)
    refuse_unused_with_ablation(args, "naive", schedule="paper", reflect="paper", judge="")
    refuse_unused_with_ablation(args, "reflect", reflect="paper")
    # These modules import jax, so they are imported only after the arguments have been checked.
    from rrl.rewards.judge_settings import judge_sections
    from rrl.setup.settings import with_defaults

    tiny, real = args.size == "tiny", args.data != "miniwiki"
    config = base_config("tiresrag_grpo", arg, args)
    config.policy = args.policy or (
        "runs/tiresrag_cold_start/model" if tiny else f"models/Qwen2.5-{args.size.upper()}-Instruct"
    )

    opening = args.prompt
    if opening == "auto":
        opening = "bare" if tiny else "instruct"
    config.recipe = {
        "name": "tiresrag",
        "opening": opening,
        "schedule": args.schedule,
        "reflect_table": args.reflect,
        "advantage": {"grpo": "grpo_population", "reinforce_pp": "reinforce_plus_plus"}[args.estimator],
        **ABLATIONS[args.ablation],
    }
    judge = args.judge or ("oracle" if not real else "models/Qwen3-8B")
    # The context holds a whole trajectory, the judge's reasoning and its answer.
    config.update(judge_sections(judge, args.judge_model, context=0 if tiny else 20480))
    config.judge_rollout.rows = 64 if tiny else 32

    config.update(MINIWIKI if tiny else PUBLISHED)
    if args.steps is not None:
        config.train.steps = args.steps
    if tiny:
        config.train.eval_every = max(1, config.train.steps // 2)
    config.train.update({"seed": args.seed, "permute_rewards": args.control == "permuted"})
    if is_smoke(args):
        shrink_to_smoke(config)
    return with_defaults(config)
