"""R2AG: a retrieval steering model that expands trees of queries and documents.

    python launch/sft.py --config=configs/miniwiki_cold_start.py:recipe=r2ag,init=assets/miniwiki-policy \\
      --workdir=runs/r2ag_cold_start
    python launch/train.py --config=configs/r2ag.py                        # built-in world, from that start
    python launch/trees.py --config=configs/r2ag.py                        # draws its trees; compares with single-step retrieval
    python launch/train.py --config=configs/r2ag.py:predictions=off        # Table 1: evaluated with base queries only
    python launch/train.py --config=configs/r2ag.py:top_k=2,t=half         # Table A.6: evaluated with other k and t
    python launch/train.py --config=configs/r2ag.py:size=7b,data=FOLDER,policy=FOLDER,reader=FOLDER,encoder=FOLDER

size=tiny is the built-in world (`miniwiki`), whose questions need at most 4 documents. `reader` is the generator, which answers
from the retrieved documents. The main metric is full recall. Expected result: 46 updates raise it from 57.5 % (cold start) to
62.9 % (mean of three seeds, 720 questions). With 96 updates, fewer questions per update and more outputs per question, it rises
from 59.6 % (a better cold start) to 67.0 % (docs/recipes.md). Three things were tuned: the number of updates; the number of
demonstrations; and the learning rate, jointly with the numbers of questions and outputs. A cold start on 500 demonstrations has
80.7 % and gains 3.5 to 7.4 points.

size=3b and size=7b hold the paper's settings (appendix B.2): trees of 128 prompts per step x 12 outputs of at most 4,096 tokens,
at most 5 expansions, top-1 documents in training, clip 0.2/0.28, no KL, AdamW at 1e-6, 80 steps, evaluation at temperature 0.6.
The paper evaluates with top-p 0.9 (C.2), but a run has a single top-p for training and evaluation; use
`launch/eval.py --config.rollout.top_p=0.9`. The paper's model is Qwen3-8B, the default of size=7b. It trained on 500 questions
of HotpotQA, 3,000 of 2Wiki and 1,174 of MuSiQue for 140 hours on 6 A100, and reaches a full recall of 87.1 on HotpotQA, 94.1 on
2Wiki and 51.3 on MuSiQue (Table 1, top-1). rrl has not been run at this size.

An output of the policy proposes base queries, for the current hop, and predicted queries, for the next one. Three arguments set
how a policy is evaluated. `predictions`: whether predicted queries are searched too. `top_k`: documents per query. `t`: how many
base queries of an output are searched: `most` is the paper's M, the largest number of hops in the data (argument `hops`), and
`half` is half of it. Half as many predicted queries are searched. In training, all queries of an output are searched.
"""

from typing import Any

from ml_collections import ConfigDict

from rrl.config.shared import MINIWIKI_OPTIM, base_config, is_smoke, parse_run_arguments, shrink_to_smoke
from rrl.errors import UserError

ARGUMENTS: dict[str, Any] = {
    "reader": "",
    "prompt": ("auto", "instruct", "bare"),
    "predictions": ("on", "off"),
    "top_k": 1,
    "t": ("most", "half"),
    "hops": 4,
}
"""Arguments beside those of every training config, with their defaults. A tuple lists the allowed values, the default first."""

POLICIES = {
    "tiny": "runs/r2ag_cold_start/model",
    "3b": "models/Qwen2.5-3B-Instruct",
    "7b": "models/Qwen3-8B",
}
"""Size -> default policy."""

MINIWIKI: dict[str, dict[str, Any]] = {
    "recipe": {
        # The forest (Algorithm 1) is the set of trees that grow at the same time. Here it has few trees, so that a short run
        # completes several forests.
        "trees": 160,
        # No reward for documents that the tree already has. With such a reward, as printed in the paper, a small policy learns
        # to search for them again: their share of the held-out searches rose from 16 % to 31 % in 12 small updates.
        "pay_known": False,
        "environment": {"expansions": 5, "turn_tokens": 192},
    },
    "rollout": {
        "rows": 64,
        "context": 640,
        "wake_threshold": 16,
        "prefill_tokens": 256,
        "workers": 2,
        "top_p": 1.0,
    },
    "reader_rollout": {"rows": 32, "context": 512, "prefill_tokens": 512, "workers": 2},
    "train": {
        "steps": 46,
        # With 32 questions x 8 outputs at a learning rate of 3e-4, full recall fell by 3.3 points with one of three seeds in
        # as many updates.
        "questions": 48,
        "samples": 5,
        "temperature": 1.0,
        "eval_temperature": 0.0,
        "average_last": 0.5,
    },
    "objective": {
        # The paper has no KL. Without it, gradient noise moves a policy of this size further than the reward does.
        "kl_coef": 0.1,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "group_token_mean",
        "drop_spread": 0.0,
        # A row holds two or three groups, with each prompt stored once. Shorter rows would often hold only one.
        "row_lengths": (1792,),
        "microbatch_tokens": 3584,
        "share_prefixes": True,
        "parallel_microbatches": 2,
    },
    "optim": MINIWIKI_OPTIM | {"lr": 2e-4},
}
"""Sections for size=tiny."""

PUBLISHED: dict[str, dict[str, Any]] = {
    "recipe": {
        "trees": 0,  # all questions at once, as in Algorithm 1
        "pay_known": True,  # the reward as printed (Eq. 5)
        "environment": {"expansions": 5, "turn_tokens": 4096},
    },
    "rollout": {
        "rows": 256,
        "context": 16384,
        "wake_threshold": 16,
        "prefill_tokens": 2048,
        "workers": 0,
        "top_p": 1.0,
    },
    "reader_rollout": {"rows": 128, "context": 8192, "prefill_tokens": 2048, "workers": 0},
    "train": {
        "steps": 80,
        "questions": 128,
        "samples": 12,
        "temperature": 1.0,
        "eval_every": 20,
        "eval_temperature": 0.6,
        "average_last": 0.0,
    },
    "objective": {
        "kl_coef": 0.0,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "group_token_mean",
        "drop_spread": 0.0,
        "row_lengths": (2048, 4096, 8192, 16384),
        "microbatch_tokens": 32768,
        "share_prefixes": False,
        "parallel_microbatches": 1,
    },
    "optim": {
        "name": "adamw",
        "lr": 1e-6,
        "warmup_ratio": 0.0,
        "weight_decay": 0.01,
        "clip_norm": 1.0,
        "schedule": "constant",
        "b2": 0.999,
        "frozen": (),
    },
}
"""Sections with the paper's settings, for size=3b and size=7b."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/r2ag.py:ARG`."""
    args = parse_run_arguments(arg, **ARGUMENTS)
    if args.hops < 1:
        raise UserError(
            f"config argument hops={args.hops} must be at least 1: the largest number of queries that a question needs"
        )
    from rrl.setup.settings import with_defaults  # imports jax: only after the arguments are checked

    tiny = args.size == "tiny"
    config = base_config("r2ag", arg, args)
    config.policy = args.policy or POLICIES[args.size]
    config.reader = args.reader or ("assets/miniwiki-reader" if tiny else POLICIES["7b"])

    config.recipe = {"name": "r2ag"}
    config.update(MINIWIKI if tiny else PUBLISHED)
    opening = args.prompt
    if opening == "auto":
        opening = "bare" if tiny else "instruct"
    queries = args.hops if args.t == "most" else max(1, args.hops // 2)
    config.recipe.environment.opening = opening
    config.recipe.environment.base_queries = queries
    config.recipe.environment.predicted_queries = max(1, queries // 2) if args.predictions == "on" else 0
    config.rollout.top_k = args.top_k

    if args.steps is not None:
        config.train.steps = args.steps
    if tiny:
        config.train.eval_every = max(1, config.train.steps // 2)
    config.train.update({"seed": args.seed, "permute_rewards": args.control == "permuted"})
    if is_smoke(args):
        shrink_to_smoke(config)
        config.recipe.trees = 16
    return with_defaults(config)
