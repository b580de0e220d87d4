"""The reader of the built-in world: a Llama-shaped model that answers from evidence (R-Search, Eq. 4 and Table 5).

    python launch/sft.py --config=configs/miniwiki_reader.py --workdir=runs/reader

It belongs to another model family than the policy, as in the paper. Cost: about 4 minutes on 2 quiet cores. The model is written
to WORKDIR/model, or to out=FOLDER.
"""

from ml_collections import ConfigDict

from rrl.config.arguments import parse
from rrl.config.shared import READING_OPTIM


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/miniwiki_reader.py:ARG`."""
    args = parse(arg, steps=900, seed=0, out="", tokenizer="assets/miniwiki-tokenizer")
    config = ConfigDict()
    config.stage = "evidence"
    config.init = ""
    config.tokenizer = args.tokenizer
    config.out = args.out
    # The initial parameters are multiplied by these. 0: each layer initially passes its input on.
    config.scales = {"embedding": 5.0, "residual": 0.0}
    config.model = {
        "model_type": "llama",
        "hidden": 128,
        "layers": 4,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "mlp": 256,
        "tie_embeddings": True,
        "max_positions": 2048,
        "rope_theta": 1e6,
    }
    config.induction = {"offsets": (1, 2)}
    config.data = {
        "worlds": 10,
        "world_size": 200,
        "steps_per_block": 20,
        # Share of the examples whose evidence lacks a required sentence.
        "options": {"missing": 0.2},
        # The reader learns to look up facts from the reading examples of configs/miniwiki_pretrain.py: answers alone have too
        # few target tokens. Shares of tokens that come from reading examples, during the curriculum and after it:
        "curriculum": "3:350",
        "reading": 0.75,
        "reading_later": 0.3,
        "reading_options": {"plain": 0.1, "drills": 0.25, "most_passages": 4},
    }
    config.train = {
        "steps": args.steps,
        "rows": 10,
        "row_length": 384,
        "seed": args.seed,
        "eval_every": max(1, args.steps // 8),
        "checkpoint_every": 250,
    }
    config.optim = dict(READING_OPTIM)
    from rrl.sft.stages import with_defaults  # imports jax: only after the arguments are checked

    return with_defaults(config)
