"""Trains a text encoder: `python launch/encoder.py --config=configs/miniwiki_encoder.py --workdir=FOLDER`."""

from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from rrl.runs import launcher

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, with its arguments after a colon.", lock_config=True
)
_WORKDIR = flags.DEFINE_string(
    "workdir", "runs/encoder", "Folder of the run; the encoder is written to its subfolder model."
)
flags.register_validator("workdir", lambda folder: folder != "", message="--workdir must name a folder")
flags.mark_flags_as_required(["config"])


def main(_: Sequence[str]) -> None:
    """Train, write the encoder's folder and print its recall beside that of BM25."""
    from rrl.config.sections import build
    from rrl.sft.encoder import EncoderTrainingConfig, train_and_save

    config = _CONFIG.value
    train_and_save(
        build(EncoderTrainingConfig, config.training.to_dict(), "training"),
        config.tokenizer,
        config.out or f"{_WORKDIR.value}/model",
    )


if __name__ == "__main__":
    launcher.run(main, callbacks=False)  # no rollout, hence no host callbacks
