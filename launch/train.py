"""Runs reinforcement learning: `python launch/train.py --config=configs/rsearch_grpo.py [--workdir=FOLDER]`."""

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
    "Folder of the run (default: runs/ and the config's `name`). An existing run is continued.",
)
flags.register_validator("workdir", lambda folder: folder != "", message="--workdir must name a folder")
flags.mark_flags_as_required(["config"])


def main(_: Sequence[str]) -> None:
    """Train and print the summary."""
    from rrl.train.experiment import run

    config = _CONFIG.value
    outcome = run(config, _WORKDIR.value or f"runs/{config.name}")
    if outcome.stopped != "done":
        sys.exit(launcher.EXIT_STOPPED if outcome.stopped == "signal" else launcher.EXIT_COLLAPSED)


if __name__ == "__main__":
    launcher.run(main)
