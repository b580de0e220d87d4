"""R3-RAG's supervised training (section 3.2.2): trains on the pairs of `launch/cold_start.py`; the result is R3-RAG-CS.

    python launch/sft.py --config=configs/r3rag_sft.py:pairs=runs/r3rag_data/pairs.jsonl,init=FOLDER --workdir=runs/r3rag_cs
    python launch/sft.py --config=configs/r3rag_sft.py:size=tiny,pairs=FILE,init=runs/r3rag_cold_start/model

A pair is a line {"input": the user message, "output": the target}. The loss is on outputs only, and pairs are packed into rows.
size=7b is the paper's Qwen2.5-7B (lr 7e-6, batch 16), size=8b its Llama-3.1-8B (lr 1e-5, batch 8), both with at most 4,096
tokens; longer pairs are left out (appendix C). A row of 4,096 tokens holds several pairs, so a batch of as many rows has more
pairs than the paper's. The paper states neither epochs nor schedule: `steps` sets the length, the log prints the number of steps
per epoch, and the learning rate decays linearly after a warm-up over 3 % of the steps. The loss on the pairs of 100 held-out
questions is measured ten times. size=tiny is for policies of the built-in world.
"""

from ml_collections import ConfigDict

from rrl.config.arguments import parse

INIT = {
    "tiny": "runs/r3rag_cold_start/model",
    "7b": "models/Qwen2.5-7B",
    "8b": "models/Llama-3.1-8B",
}
"""Size -> default model from which training starts."""


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/r3rag_sft.py:ARG`."""
    args = parse(arg, size=("7b", "8b", "tiny"), pairs="", init="", out="", steps=int, held_out=int, seed=0)
    tiny = args.size == "tiny"
    steps = args.steps if args.steps is not None else (120 if tiny else 2000)
    config = ConfigDict()
    config.stage = "pairs"
    config.init = args.init or INIT[args.size]
    config.tokenizer = ""
    config.out = args.out
    config.model = {}
    config.data = {
        "path": args.pairs or "runs/r3rag_cold_start/pairs.jsonl",
        "held_out": args.held_out if args.held_out is not None else 100,
        "recipe": "r3rag",
        "recipe_options": {},
        "environment": {"max_steps": 5, "turn_tokens": 128 if tiny else 512},
        "context": 1024 if tiny else 8192,
        "top_k": 2 if tiny else 5,
    }
    config.train = {
        "steps": steps,
        "rows": {"tiny": 8, "7b": 16, "8b": 8}[args.size],
        "row_length": 768 if tiny else 4096,
        "seed": args.seed,
        "eval_every": max(1, steps // 10),
        "checkpoint_every": max(1, steps // 10),
    }
    config.optim = {
        "name": "adamw",
        "lr": {"tiny": 3e-4, "7b": 7e-6, "8b": 1e-5}[args.size],
        "schedule": "linear",
        "warmup_ratio": 0.03,
        "weight_decay": 0.0,
    }
    config.mesh = {"fsdp": 1 if tiny else -1}
    config.compute = {"dtype": "float32" if tiny else "auto", "remat": "none" if tiny else "full"}
    from rrl.sft.stages import with_defaults  # imports jax: only after the arguments are checked

    return with_defaults(config)
