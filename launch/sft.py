"""Runs supervised training: `python launch/sft.py --config=configs/miniwiki_pretrain.py [--workdir=FOLDER]`."""

import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from rrl.runs import launcher

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, with its arguments after a colon.", lock_config=True
)
_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run (default: runs/NAME, with the config's file name and arguments as NAME, without miniwiki_). An existing "
    "run is continued.",
)
flags.register_validator("workdir", lambda folder: folder != "", message="--workdir must name a folder")
flags.mark_flags_as_required(["config"])


def main(_: Sequence[str]) -> None:
    """Train, then write the Hugging Face folder."""
    from rrl.sft.stages import run

    workdir = _WORKDIR.value or launcher.default_workdir(flags.FLAGS["config"])
    if run(_CONFIG.value, workdir).stopped == "signal":
        sys.exit(launcher.EXIT_STOPPED)


if __name__ == "__main__":
    launcher.run(main, callbacks=False)  # no rollout, hence no host callbacks
