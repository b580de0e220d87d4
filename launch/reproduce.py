"""Tests the papers' claims on the built-in world: `python launch/reproduce.py [--only=process,tree] [--list]`.

Executes the missing runs, two at a time, and writes runs/reproduce/reproduction.md, a table of claims and verdicts. The same
command continues an interrupted reproduction. The published page is docs/reproduction.md, and its measurements are stored in
docs/reproduction/. With --keep=docs/reproduction these count as finished runs.
"""

import pathlib
import shlex
from collections.abc import Sequence

from absl import flags

from rrl.runs import launcher

_OUT = flags.DEFINE_string(
    "out", None, "Folder of the runs (default: runs/reproduce, or runs/reproduce-smoke)."
)
_PAGE = flags.DEFINE_string(
    "page",
    None,
    "The page to write (default: reproduction.md in --out; the published page is docs/reproduction.md).",
)
_KEEP = flags.DEFINE_string(
    "keep",
    None,
    "Folder of stored measurements; their runs are not executed again (default: subfolder 'kept' of --out).",
)
_ONLY = flags.DEFINE_list(
    "only", [], "Claims whose runs are executed (default: all). The page shows all measured claims."
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Training seeds.")
_JOBS = flags.DEFINE_integer(
    "jobs",
    None,
    "Number of runs at a time, each on its share of the cores (default: 2, or 1 on a single core).",
)
_LIST = flags.DEFINE_bool("list", False, "Lists the runs with state, minutes and command, and exits.")
_RUN = flags.DEFINE_bool(
    "run", True, "--norun: executes nothing, and writes the page of the stored measurements."
)
_SMOKE = flags.DEFINE_bool("smoke", False, "Uses tiny sizes, which only check that all commands complete.")


def main(_: Sequence[str]) -> None:
    """Execute the missing runs and write and print the page."""
    from rrl.studies.reproduction.options import RunOptions, parse_seeds
    from rrl.studies.reproduction.reproduce import reproduce

    out = _OUT.value or ("runs/reproduce-smoke" if _SMOKE.value else "runs/reproduce")
    page = _PAGE.value or f"{out}/reproduction.md"
    # The page names the command that writes it again: only the flags that change its content.
    page_flags = ["--smoke"] * _SMOKE.value
    page_flags += [f"--seeds={','.join(_SEEDS.value)}"] * _SEEDS.present + [f"--out={out}"] * _OUT.present
    page_flags += [f"--keep={_KEEP.value}"] * _KEEP.present
    options = RunOptions(
        seeds=parse_seeds(_SEEDS.value),
        jobs=_JOBS.value,
        smoke=_SMOKE.value,
        list_only=_LIST.value,
        execute=_RUN.value,
    )
    outcome = reproduce(
        pathlib.Path(out),
        pathlib.Path(page),
        options,
        store_folder=pathlib.Path(_KEEP.value) if _KEEP.value else None,
        only=_ONLY.value,
        command=shlex.join(["python", "launch/reproduce.py", *page_flags]),
    )
    launcher.exit_after_runs(outcome.failed, outcome.stopped, outcome.retryable)


if __name__ == "__main__":
    launcher.run(main)
