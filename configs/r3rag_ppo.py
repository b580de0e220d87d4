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
critic with all layers at 3e-4 is 0 for 27 updates and 1/8 after 54. Expected result: 20 updates add 6 points to a start of 100
demonstrations (docs/recipes.md). Cost: about eight minutes on two slow cores, without evaluations.

size=7b holds the paper's settings (section 4.3, appendix C): Qwen2.5-7B after its cold start (`configs/r3rag_cold_start.py`
makes the data, `configs/r3rag_sft.py` trains on it), batch 64 (16 questions x 4 rollouts at temperatures 0.1, 0.4, 0.7 and
1.0), one epoch over 8,192 HotpotQA questions, learning rates 5e-7 (actor) and 9e-6 (critic), top-k 5, at most 5 steps, 512
characters per document, gamma = lambda = 1 within a step, advantages whitened over the batch, KL to the initial model as a loss
(Eq. 7). The paper states no KL weight, clip range or rollout length; they are 0.01, 0.2 and 512 tokens. The judge is
Qwen2.5-14B-Instruct. The paper ran on H100s and reaches EM 46.4 on HotpotQA, 54.2 on 2Wiki and 21.4 on MuSiQue with E5 (Table 1;
its cold start: 45.2, 46.1, 21.9). It also trained Llama-3.1-8B, with the same settings: policy=FOLDER. size=3b is not in the
paper: the same settings for Qwen2.5-3B.

steps=0 only evaluates. It shows whole documents, as the paper's evaluation does; held-out evaluations during training cut
documents as training does. To evaluate a policy with another retriever, combine steps=0 with its folder and `retriever`, or with
`--config.retriever.kind=bm25`, `exact`, ...

`judge` is "oracle" (data with gold passages), the folder of a model, or the http address of an OpenAI-compatible service, with
its `judge_model`. The service's key is read from OPENAI_API_KEY. A model or service also extracts short answers for EM and F1.
"""

from typing import Any

from ml_collections import ConfigDict

from rrl.config.shared import (
    base_config,
    is_smoke,
    parse_run_arguments,
    refuse_unused_with_ablation,
    shrink_to_smoke,
)

ABLATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "process": {"use_process": False},
    "outcome": {"use_outcome": False},
}
"""Ablation in Table 2 -> fields of the recipe. The last row of the table leaves out both rewards, so it is the cold-started
policy: use `steps=0`."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/r3rag_ppo.py:ARG`."""
    args = parse_run_arguments(
        arg,
        judge="",
        judge_model="",
        ablation=tuple(ABLATIONS),
        last_step=("figure", "equation"),
        malformed=("paper", "released"),
        cut=("document", "block"),
    )
    refuse_unused_with_ablation(args, "outcome", last_step="figure")
    if args.size == "tiny" and args.data == "miniwiki":  # there the judge scores documents only
        refuse_unused_with_ablation(args, "process", judge="")
    # These modules import jax, so they are imported only after the arguments have been checked.
    from rrl.rewards.judge_settings import judge_sections
    from rrl.train.settings import with_defaults

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
    config.recipe.environment = {
        "max_steps": 5,
        "turn_tokens": 128 if tiny else 512,
        "document_characters": 0 if args.steps == 0 and not tiny else 512,
        "cut": args.cut,
    }
    config.rollout = {
        "rows": 128 if tiny else 64,
        "oversubscribed_slots": 0,
        "context": 1024 if tiny else 8192,
        "wake_threshold": 16,
        "prefill_tokens": 512 if tiny else 2048,
        "workers": 2 if tiny else 0,
        "top_k": 2 if tiny else 5,
        "top_p": 0.95 if tiny else 1.0,
    }
    judge = args.judge or ("oracle" if not real else "models/Qwen2.5-14B-Instruct")
    config.update(judge_sections(judge, args.judge_model))
    steps = args.steps if args.steps is not None else (20 if tiny else 512)
    config.train = {
        "steps": steps,
        # As in configs/rsearch_ppo.py: more questions are more informative than more samples of one question. With 96
        # questions instead of 128, seeds 0 and 1 gain 3.5 and 3.9 points instead of 8.6 and 5.0.
        "questions": 128 if tiny else 16,
        "samples": 1 if tiny else 4,
        "temperatures": (1.0,) if tiny else (0.1, 0.4, 0.7, 1.0),
        "seed": args.seed,
        "eval_every": 0 if tiny else 64,  # 0: only at the start and the end
        "eval_temperature": 0.0,
        "average_last": 0.5 if tiny else 0.0,
        "permute_rewards": args.control == "permuted",
    }
    config.objective = {
        "kl_coef": 0.05 if tiny else 0.01,
        "kl_estimator": "k3",
        "kl_in": "loss",
        "whiten": True,
        "clip_low": 0.2,
        "clip_high": 0.2,
        # Short rows: each minibatch of the critic then fills an even number of rows, as two parallel microbatches need. A
        # single length compiles one program; trajectories whose steps are longer in total are split (`rrl.rl.prefix_tree`).
        "row_lengths": (2048,) if tiny else (1024, 2048, 4096, 8192),
        "microbatch_tokens": 2048 if tiny else 32768,
        "share_prefixes": tiny,
        "parallel_microbatches": 2 if tiny else 1,
    }
    config.critic = {
        "discount": 1.0,
        "gae_lambda": 1.0,
        # With returns within a step only, a small policy learns to answer at once, which is often correct by luck.
        "across_contexts": tiny,
        # Half of the layers take 6 s per update instead of 11 (docs/recipes.md). Each of six minibatches fills an even number
        # of rows, so two streams process them without waiting for each other.
        "layers": 2 if tiny else 0,
        "minibatches": 6 if tiny else 1,
        "warmup_steps": min(1, steps // 4) if tiny else 0,
    }
    config.critic_optim = {
        "name": "adamw",
        "lr": 1e-3 if tiny else 9e-6,
        "clip_norm": 1.0,
        "b2": 0.999,
        "frozen": ("^embedding$",) if tiny else (),
    }
    config.optim = {
        "name": "adamw",
        "lr": 5e-4 if tiny else 5e-7,
        "warmup_ratio": 0.2 if tiny else 0.03,
        "weight_decay": 0.0,
        "clip_norm": 1.0,
        "schedule": "linear" if tiny else "cosine",
        "b2": 0.999,
        "frozen": ("^embedding$",) if tiny else (),
    }
    if is_smoke(args):
        shrink_to_smoke(config)
    return with_defaults(config)
