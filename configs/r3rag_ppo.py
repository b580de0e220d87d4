"""R3-RAG with PPO: step-by-step reasoning and retrieval, a critic, rewards for the answer and for the documents of each step.

    python launch/sft.py --config=configs/miniwiki_cold_start.py:recipe=r3rag,init=assets/miniwiki-policy \\
      --workdir=runs/r3rag_cold_start
    python launch/train.py --config=configs/r3rag_ppo.py                                   # built-in world, from that start
    python launch/train.py --config=configs/r3rag_ppo.py:ablation=process                  # Table 2: without process reward
    python launch/train.py --config=configs/r3rag_ppo.py:ablation=outcome                  # without outcome reward
    python launch/train.py --config=configs/r3rag_ppo.py:size=7b,data=FOLDER,policy=FOLDER,judge=FOLDER,encoder=FOLDER
    python launch/train.py --config=configs/r3rag_ppo.py:steps=0,policy=FOLDER --config.retriever.kind=bm25  # Tables 3 and 5

size=tiny is the built-in world (`miniwiki`), whose oracle knows the gold passages. Answers are short there, so only exact
matches count. The KL weight and the number of questions are those tuned for R-Search's PPO (`configs/rsearch_ppo.py`, which has
the KL in the reward). The learning rate is higher, for fewer updates. The critic is the first half of the policy's layers and
takes six optimiser steps per batch at 1e-3. Its explained variance of the returns is 1/8 after 10 to 15 updates; that of a
critic with all layers at 3e-4 is 0 for 27 updates and 1/8 after 54. Expected result: 20 updates add 6 points to a cold start on
100 demonstrations (docs/recipes.md). Cost: about eight minutes on two slow cores, without evaluations.

size=7b holds the paper's settings (section 4.3, appendix C): Qwen2.5-7B after its cold start (`configs/r3rag_cold_start.py`
makes the data, `configs/r3rag_sft.py` trains on it), batch 64 (16 questions x 4 rollouts at temperatures 0.1, 0.4, 0.7 and
1.0), one epoch over 8,192 HotpotQA questions, learning rates 5e-7 (actor) and 9e-6 (critic), top-k 5, at most 5 steps, 512
characters per document, gamma = lambda = 1 within a step, advantages whitened over the batch, KL to the initial model as a loss
(Eq. 7). The paper states no KL weight, clip range or rollout length; they are 0.01, 0.2 and 512 tokens. The judge is
Qwen2.5-14B-Instruct. The paper ran on H100s and reaches EM 46.4 on HotpotQA, 54.2 on 2Wiki and 21.4 on MuSiQue with E5 (Table 1;
its cold start: 45.2, 46.1, 21.9). It also trained Llama-3.1-8B, with the same settings: policy=FOLDER. size=3b is not in the
paper: the same settings for Qwen2.5-3B.

steps=0 only evaluates. At size=3b and size=7b it shows whole documents, as the paper's evaluation does; held-out evaluations
during training cut documents as training does. To evaluate a policy with another retriever, combine steps=0 with its folder and
`retriever`, or with `--config.retriever.kind=bm25`, `exact`, ...

Arguments for comparisons: `ablation` is a row of Table 2. `last_step` is the reward of the last step of a correct trajectory: 2
as in Figure 2 ("figure"), or that of Eq. 6 ("equation"). `malformed` is the reward of a malformed step: -1 (Eq. 5), or -0.9
("released"). `cut` shortens each document, or the whole block of documents of a step.

`judge` is "oracle" (data with gold passages), the folder of a model, or the http address of an OpenAI-compatible service, with
its `judge_model`. The service's key is read from OPENAI_API_KEY. A model or service also extracts short answers for EM and F1.
"""

from typing import Any

from ml_collections import ConfigDict

from rrl.config.shared import (
    MINIWIKI_OPTIM,
    base_config,
    is_smoke,
    parse_run_arguments,
    refuse_unused_with_ablation,
    shrink_to_smoke,
)

MINIWIKI: dict[str, dict[str, Any]] = {
    "recipe": {"environment": {"max_steps": 5, "turn_tokens": 128, "document_characters": 512}},
    "rollout": {
        "rows": 128,
        "oversubscribed_slots": 0,
        "context": 1024,
        "wake_threshold": 16,
        "prefill_tokens": 512,
        "workers": 2,
        "top_k": 2,  # passages per search
        "top_p": 0.95,
    },
    "train": {
        "steps": 20,
        # As in configs/rsearch_ppo.py: more questions are more informative than more samples of one question. With 96
        # questions instead of 128, seeds 0 and 1 gain 3.5 and 3.9 points instead of 8.6 and 5.0.
        "questions": 128,
        "samples": 1,
        "temperatures": (1.0,),
        "eval_every": 0,  # only at the start and the end
        "eval_temperature": 0.0,
        "average_last": 0.5,
    },
    "objective": {
        "kl_coef": 0.05,
        "kl_estimator": "k3",
        "kl_in": "loss",
        "whiten": True,
        "clip_low": 0.2,
        "clip_high": 0.2,
        # With rows this short, each minibatch of the critic fills an even number of rows, so that its microbatches can be
        # processed two at a time. A single row length compiles a single program. A trajectory whose steps do not fit into one row
        # together is split (`rrl.rl.prefix_tree`).
        "row_lengths": (2048,),
        "microbatch_tokens": 2048,
        "share_prefixes": True,
        "parallel_microbatches": 2,
    },
    "critic": {
        "discount": 1.0,
        "gae_lambda": 1.0,
        # If a step is credited only with its own reward, a small policy learns to answer at once, often correctly by luck.
        "across_contexts": True,
        # Half of the layers take 6 s per update instead of 11 (docs/recipes.md).
        "layers": 2,
        "minibatches": 6,
    },
    "critic_optim": {"name": "adamw", "lr": 1e-3, "clip_norm": 1.0, "b2": 0.999, "frozen": ("^embedding$",)},
    "optim": MINIWIKI_OPTIM | {"lr": 5e-4, "warmup_ratio": 0.2},
}
"""Sections for size=tiny."""

PUBLISHED: dict[str, dict[str, Any]] = {
    "recipe": {"environment": {"max_steps": 5, "turn_tokens": 512, "document_characters": 512}},
    "rollout": {
        "rows": 64,
        "oversubscribed_slots": 0,
        "context": 8192,
        "wake_threshold": 16,
        "prefill_tokens": 2048,
        "workers": 0,
        "top_k": 5,  # passages per search
        "top_p": 1.0,
    },
    "train": {
        "steps": 512,
        "questions": 16,
        "samples": 4,
        "temperatures": (0.1, 0.4, 0.7, 1.0),
        "eval_every": 64,
        "eval_temperature": 0.0,
        "average_last": 0.0,
    },
    "objective": {
        "kl_coef": 0.01,
        "kl_estimator": "k3",
        "kl_in": "loss",
        "whiten": True,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "row_lengths": (1024, 2048, 4096, 8192),
        "microbatch_tokens": 32768,
        "share_prefixes": False,
        "parallel_microbatches": 1,
    },
    "critic": {
        "discount": 1.0,
        "gae_lambda": 1.0,
        "across_contexts": False,
        "layers": 0,  # all
        "minibatches": 1,
        "warmup_steps": 0,
    },
    "critic_optim": {"name": "adamw", "lr": 9e-6, "clip_norm": 1.0, "b2": 0.999, "frozen": ()},
    "optim": {
        "name": "adamw",
        "lr": 5e-7,
        "warmup_ratio": 0.03,
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
    "process": {"use_process": False},
    "outcome": {"use_outcome": False},
}
"""Ablation in Table 2 -> fields of the recipe. The last row of the table leaves out both rewards, so it is the cold-started
policy: use `steps=0`."""

ARGUMENTS: dict[str, Any] = {
    "judge": "",
    "judge_model": "",
    "ablation": tuple(ABLATIONS),
    "last_step": ("figure", "equation"),
    "malformed": ("paper", "released"),
    "cut": ("document", "block"),
}
"""Arguments beside those of every training config, with their defaults. A tuple lists the allowed values, the default first."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/r3rag_ppo.py:ARG`."""
    args = parse_run_arguments(arg, **ARGUMENTS)
    refuse_unused_with_ablation(args, "outcome", last_step="figure")
    if args.size == "tiny" and args.data == "miniwiki":  # there the judge scores documents only
        refuse_unused_with_ablation(args, "process", judge="")
    # These modules import jax, so they are imported only after the arguments have been checked.
    from rrl.rewards.judge_settings import judge_sections
    from rrl.setup.settings import with_defaults

    tiny, real = args.size == "tiny", args.data != "miniwiki"
    config = base_config("r3rag_ppo", arg, args)
    config.policy = args.policy or (
        "runs/r3rag_cold_start/model" if tiny else f"models/R3-RAG-CS-Qwen2.5-{args.size.upper()}"
    )

    config.recipe = {
        "name": "r3rag",
        "last_step": args.last_step,
        "malformed_reward": {"paper": -1.0, "released": -0.9}[args.malformed],
        **ABLATIONS[args.ablation],
    }
    if tiny and not real:  # the oracle's verdict on an answer equals an exact match
        config.recipe.update({"match": "exact", "judge_answers": False, "short_answers": False})
    judge = args.judge or ("oracle" if not real else "models/Qwen2.5-14B-Instruct")
    config.update(judge_sections(judge, args.judge_model))

    config.update(MINIWIKI if tiny else PUBLISHED)
    config.recipe.environment.cut = args.cut
    if args.steps == 0 and not tiny:
        config.recipe.environment.document_characters = 0  # whole documents
    if args.steps is not None:
        config.train.steps = args.steps
    config.train.update({"seed": args.seed, "permute_rewards": args.control == "permuted"})
    if tiny:
        config.critic.warmup_steps = min(1, config.train.steps // 4)
    if is_smoke(args):
        shrink_to_smoke(config)
    return with_defaults(config)
