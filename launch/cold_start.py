"""Samples demonstrations from a teacher: `python launch/cold_start.py --config=configs/r3rag_cold_start.py`."""

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
    "Folder of the run (default: runs/NAME, with the config's file name and arguments as NAME). An existing run is continued.",
)
flags.register_validator("workdir", lambda folder: folder != "", message="--workdir must name a folder")
flags.mark_flags_as_required(["config"])


def main(_: Sequence[str]) -> None:
    """Sample trajectories, keep the correct and well-formed ones, and print a report."""
    from rrl.sft.cold_start import run

    if run(_CONFIG.value, _WORKDIR.value or launcher.default_workdir(flags.FLAGS["config"])) is None:
        sys.exit(launcher.EXIT_STOPPED)


if __name__ == "__main__":
    launcher.run(main)
