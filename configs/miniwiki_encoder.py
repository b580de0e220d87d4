"""The text encoder of the built-in world: one BERT layer of width 128, trained from scratch by InfoNCE.

    taskset -c 1 python launch/encoder.py --config=configs/miniwiki_encoder.py --workdir=runs/encoder

About 2 minutes on one quiet core. Prints recall@3 on unseen worlds beside BM25's, 100 % within rounding for both.
The folder is written to WORKDIR/model, or to out=FOLDER; with out=assets/miniwiki-encoder it made the shipped one.
"""

from ml_collections import ConfigDict

from rrl.config.arguments import parse


def get_config(arg: str = "") -> ConfigDict:
    """The config of `--config=configs/miniwiki_encoder.py:ARG`."""
    args = parse(arg, out="", tokenizer="assets/miniwiki-tokenizer", steps=200, seed=0)
    config = ConfigDict()
    config.out = args.out
    config.tokenizer = args.tokenizer
    config.training = {
        "seed": args.seed,
        "steps": args.steps,
        "hidden": 128,
        "layers": 1,
        "heads": 4,
        "mlp": 256,
        "worlds": 100,
        "passages_per_world": 200,
        "learning_rate": 2e-3,
        "temperature": 0.05,
    }
    # They import jax: after the arguments were found right.
    from rrl.config.sections import fill_defaults
    from rrl.sft.encoder import EncoderTrainingConfig

    fill_defaults(config.training, EncoderTrainingConfig)
    return config
