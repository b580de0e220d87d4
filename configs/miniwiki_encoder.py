"""The text encoder of the built-in world: one BERT layer of width 128, trained from scratch with InfoNCE.

    taskset -c 1 python launch/encoder.py --config=configs/miniwiki_encoder.py --workdir=runs/encoder

Expected result: recall@3 on unseen worlds, printed beside that of BM25; both round to 100 %. Cost: about 2 minutes on one quiet
core. The encoder is written to WORKDIR/model, or to out=FOLDER; out=assets/miniwiki-encoder produced the shipped one.
"""

from ml_collections import ConfigDict

from rrl.config.arguments import parse


def get_config(arg: str = "") -> ConfigDict:
    """Return the config of `--config=configs/miniwiki_encoder.py:ARG`."""
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
    # These modules import jax, so they are imported only after the arguments have been checked.
    from rrl.config.sections import fill_defaults
    from rrl.sft.encoder import EncoderTrainingConfig

    fill_defaults(config.training, EncoderTrainingConfig)
    return config
