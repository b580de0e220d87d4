"""Runs reinforcement learning: `python launch/train.py --config=configs/rsearch_grpo.py [--workdir=FOLDER]`."""

import sys
from collections.abc import Sequence

from rrl.runs import launcher

_CONFIG, _WORKDIR = launcher.define_run_flags()


def main(_: Sequence[str]) -> None:
    """Train and print the summary."""
    from rrl.train.experiment import run

    config = _CONFIG.value
    outcome = run(config, _WORKDIR.value or f"runs/{config.name}")
    if outcome.stopped != "done":
        sys.exit(launcher.EXIT_STOPPED if outcome.stopped == "signal" else launcher.EXIT_COLLAPSED)


if __name__ == "__main__":
    launcher.run(main)
