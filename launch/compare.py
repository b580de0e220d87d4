"""Ways to train over seeds: `python launch/compare.py --config=configs/rsearch_grpo.py --out=runs/compare`.

GRPO and its controls; or any values of a config's argument (`--arms=ablation=none,ablation=filter`), and other config files
(`--arms=GRPO,configs/rsearch_ppo.py`), each with an argument of its own (`configs/search_r1.py:control=permuted`). It ends in a
table and a plot, and continues where it was broken off.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence

from absl import flags

from rrl.runs import launcher

_CONFIG = flags.DEFINE_string(
    "config", "configs/rsearch_grpo.py", "Config file, arguments after a colon; not seed or control."
)
_COLD_START = flags.DEFINE_string(
    "cold_start",
    "configs/miniwiki_cold_start.py:init=assets/miniwiki-policy",
    "Config that goes on with supervised training from the same start.",
)
_OUT = flags.DEFINE_string("out", "runs/compare", "Folder for the runs, the plot and the table.")
_ARMS = flags.DEFINE_list("arms", ["GRPO", "SFT continued", "rewards permuted", "search off"], "Arms to run.")
_METRIC = flags.DEFINE_string(
    "metric", "em", "What the table tells: a held-out metric, such as full_recall (R2AG)."
)
_OVER = flags.DEFINE_enum(
    "over",
    "minutes",
    ["minutes", "updates"],
    "What the plot runs over: updates, where runs had unlike machines.",
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2", "3"], "Seeds to run.")


def main(_: Sequence[str]) -> None:
    """Runs what is missing and prints the table."""
    from rrl.errors import UserError
    from rrl.studies.compare import compare

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
            f"error: exit code {error.returncode} of python {shlex.join(error.cmd)}; what it printed is above"
        )


if __name__ == "__main__":
    launcher.run(main)
