"""A judge for the built-in world: a model of the shipped policy's size learns to give reasons, then the oracle's verdict.

    taskset -c 1 python launch/sft.py --config=configs/miniwiki_judge.py:out=assets/miniwiki-judge --workdir=runs/judge
    python launch/judge.py --judge=assets/miniwiki-judge                          # measures its agreement with the oracle

The training examples come from training worlds (`rrl/sft/judge_examples.py`): retrieved documents, answers, and trajectories of
the scripted expert, which are correct, truncated or faulty. The prompts are the papers' without the system message, whose
instructions a model of this size could not follow; a judge card in the folder records this.

Expected result: the printed agreement with the oracle in held-out worlds. Cost: 13 minutes on one core. The model is written to
WORKDIR/model, or to out=FOLDER.
"""

from ml_collections import ConfigDict

from rrl.config.arguments import parse


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/miniwiki_judge.py:ARG`."""
    args = parse(arg, init="assets/miniwiki-policy", steps=1800, seed=0, out="")
    config = ConfigDict()
    config.stage = "verdicts"
    config.init = args.init
    config.tokenizer = ""
    config.out = args.out
    config.model = {}
    config.data = {
        "worlds": 5,
        "world_size": 200,
        "steps_per_block": 20,  # examples are generated in blocks
        "probes": 48,  # held-out examples of each judge prompt
        # Shares of faulty and truncated trajectories, passages per search, and token limits of the examples
        # (`rrl.sft.judge_examples.JudgeExamplesConfig`).
        "options": {"faulty": 0.6, "partial": 0.2, "top_k": 2, "context": 1280, "answer_tokens": 160},
    }
    config.train = {
        "steps": args.steps,
        "rows": 5,
        "row_length": 768,
        "seed": args.seed,
        "eval_every": max(1, args.steps // 8),
        "checkpoint_every": 200,
    }
    config.optim = {
        "name": "muon",
        "lr": 3e-3,
        "adam_lr": 1.5e-3,
        "schedule": "linear",
        "warmup_steps": 20,
        "b2": 0.95,
    }
    from rrl.sft.stages import with_defaults  # imports jax: only after the arguments are checked

    return with_defaults(config)
