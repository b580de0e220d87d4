"""Stage 0 of the built-in world's cold start: a Qwen2-shaped policy with 1.00 M parameters learns to read, copy and compare.

    python launch/sft.py --config=configs/miniwiki_pretrain.py --workdir=runs/pretrain

The texts contain no search protocol. `curriculum=PASSAGES:STEPS;PASSAGES:STEPS` limits the number of passages per example in
the first steps. Cost: about 11 minutes on 2 quiet cores. The model is written to WORKDIR/model, or to out=FOLDER.
"""

from ml_collections import ConfigDict

from rrl.config.arguments import parse
from rrl.config.shared import READING_OPTIM

MODEL = {
    "model_type": "qwen2",
    "hidden": 128,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "mlp": 384,
    "tie_embeddings": True,
    "max_positions": 2048,
    "rope_theta": 1e6,  # half of the dimensions hardly rotate, so content matches at any distance
}


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/miniwiki_pretrain.py:ARG`."""
    args = parse(
        arg,
        steps=2500,
        seed=0,
        out="",
        tokenizer="assets/miniwiki-tokenizer",
        curriculum="3:100;5:300",
    )
    config = ConfigDict()
    config.stage = "reading"
    config.init = ""
    config.tokenizer = args.tokenizer
    # The initial parameters are multiplied by these. 0: each layer initially passes its input on.
    config.scales = {"embedding": 5.0, "residual": 0.0}
    # Initialises induction heads. Without them, training first needs some million tokens until it forms such heads, and
    # learns to read only after that.
    config.induction = {"offsets": (1, 2, 3)}
    config.out = args.out
    config.model = MODEL
    config.data = {
        "worlds": 10,
        "world_size": 200,
        "steps_per_block": 20,
        # Shares of the kinds of texts; `rrl.miniwiki.reading` explains them.
        "options": {"plain": 0.1, "drills": 0.2, "questions": 0.12, "most_passages": 10},
        # Looking up a fact is easier to learn from few passages.
        "curriculum": args.curriculum,
        # Three of four blocks have short rows, in which attention is cheaper.
        "short_length": 320,
        "short_options": {"most_passages": 6},
    }
    config.train = {
        "steps": args.steps,
        "rows": 6,
        "row_length": 640,
        "seed": args.seed,
        "eval_every": max(1, args.steps // 8),
        "checkpoint_every": 250,
    }
    config.optim = dict(READING_OPTIM)
    from rrl.sft.stages import with_defaults  # imports jax: only after the arguments are checked

    return with_defaults(config)
