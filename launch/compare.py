"""Compares training methods over several seeds: `python launch/compare.py --config=configs/rsearch_grpo.py --out=runs/compare`.

Each compared method is an arm. The default arms are GRPO and its controls. An arm may also be a value of a config argument
(`--arms=ablation=none,ablation=filter`) or another config file with at most one argument
(`--arms=GRPO,configs/rsearch_ppo.py,configs/search_r1.py:control=permuted`). Writes a table and a plot. The same command
continues an interrupted comparison.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence

from absl import flags

from rrl.runs import launcher

_CONFIG = flags.DEFINE_string(
    "config",
    "configs/rsearch_grpo.py",
    "Config file, with its arguments after a colon, but without seed and control.",
)
_COLD_START = flags.DEFINE_string(
    "cold_start",
    "configs/miniwiki_cold_start.py:init=assets/miniwiki-policy",
    "Config of launch/sft.py for the arm 'SFT continued', with the starting policy as init.",
)
_OUT = flags.DEFINE_string("out", "runs/compare", "Folder of the runs, the plot and the table.")
_ARMS = flags.DEFINE_list(
    "arms", ["GRPO", "SFT continued", "rewards permuted", "search off"], "Arms to compare."
)
_METRIC = flags.DEFINE_string("metric", "em", "Held-out metric of the table, such as full_recall for R2AG.")
_OVER = flags.DEFINE_enum(
    "over",
    "minutes",
    ["minutes", "updates"],
    "X-axis of the plot; use updates if the runs used different machines.",
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2", "3"], "Training seeds.")


def main(_: Sequence[str]) -> None:
    """Execute the missing runs and print the table."""
    from rrl.errors import UserError
    from rrl.studies.arm_comparison.compare import compare

    if not all(seed.isdigit() for seed in _SEEDS.value):
        raise UserError(f"--seeds={','.join(_SEEDS.value)} must be whole numbers, separated by commas")
    seeds = [int(seed) for seed in _SEEDS.value]
    try:
        print(
            compare(
                _CONFIG.value,
                _COLD_START.value,
                _OUT.value,
                _ARMS.value,
                seeds,
                _METRIC.value,
                _OVER.value,
            )
        )
    except subprocess.CalledProcessError as error:
        if error.returncode == launcher.EXIT_USER_ERROR:  # the run has printed its error
            sys.exit(launcher.EXIT_USER_ERROR)
        sys.exit(
            f"error: exit code {error.returncode} of python {shlex.join(error.cmd)}; its output is above"
        )


if __name__ == "__main__":
    launcher.run(main)
