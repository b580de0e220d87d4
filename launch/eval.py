"""Evaluates a method on a dataset: `python launch/eval.py --config=configs/eval.py:method=...,dataset=...,policy=...`.

The same command continues an evaluation that was stopped or killed, after its last answered question.
"""

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
    """Answer the questions, score the answers and print the metrics."""
    from rrl.eval.evaluate import run

    run(_CONFIG.value, _WORKDIR.value or f"runs/{_CONFIG.value.name}")


if __name__ == "__main__":
    launcher.run(main)
