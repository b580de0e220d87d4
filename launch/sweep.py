"""Varies one field of an evaluation: `python launch/sweep.py --config=configs/eval.py:... --vary=rollout.top_k --values=1-10`.

`--vary` is a field of the config (rollout.top_k, recipe.environment.max_searches, method.steps) or an argument of the config file
(retriever, method, policy). Writes a table and a plot: sweep.md, sweep.csv and sweep.png. The same command continues an
interrupted sweep.
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from rrl.runs import launcher

_CONFIG = flags.DEFINE_string(
    "config", "configs/eval.py", "Config file of launch/eval.py, with its arguments after a colon."
)
_VARY = flags.DEFINE_string("vary", None, "Field or config argument to vary.")
_VALUES = flags.DEFINE_string("values", None, "Its values, such as 1,2,5 or 1-10 or scann,bm25.")
_SET = flags.DEFINE_multi_string(
    "set", [], "FIELD=VALUE: sets a config field of all evaluations, such as rollout.rows=32."
)
_OUT = flags.DEFINE_string(
    "out", None, "Folder for the runs, the table and the plot (default: runs/sweep-FIELD)."
)
flags.mark_flags_as_required(["vary", "values"])


def main(_: Sequence[str]) -> None:
    """Evaluate at each value and print the table."""
    from rrl.config.config_flag import with_arguments
    from rrl.eval.evaluate import run
    from rrl.studies.sweep import sweep, values_of

    name, values = _VARY.value or "", values_of(_VALUES.value or "")

    def config_at(value: str) -> Any:
        if "." in name:
            return launcher.load_config(_CONFIG.value, [*_SET.value, f"{name}={value}"])
        return launcher.load_config(with_arguments(_CONFIG.value, f"{name}={value}"), _SET.value)

    configs = {value: config_at(value) for value in values}
    command = ["python", "launch/sweep.py", *sys.argv[1:]]

    def evaluate(field: str, value: str, folder: pathlib.Path) -> None:
        print(f"{field}={value}", file=sys.stderr, flush=True)
        run(configs[value], folder, command)

    out = _OUT.value or f"runs/sweep-{name}"
    print(f"\n{sweep(name, values, evaluate, out)}\n{out}/sweep.png")


if __name__ == "__main__":
    launcher.run(main)
