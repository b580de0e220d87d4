"""The papers' claims on the built-in world, as a table: `python launch/reproduce.py [--only=process,tree] [--list]`.

Runs what is missing, two at a time, and writes runs/reproduce/reproduction.md. The same command continues what was broken off.
The published page is docs/reproduction.md, what its runs measured docs/reproduction/: with --keep=docs/reproduction that counts
as done.
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
    "page", None, "The page (default: reproduction.md in --out; the published one is docs/reproduction.md)."
)
_KEEP = flags.DEFINE_string(
    "keep",
    None,
    "Folder of small files of what each run measured, read before anything is run (default: kept in --out).",
)
_ONLY = flags.DEFINE_list(
    "only", [], "Claims whose runs are done; none: all. The page has all that are there."
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of training.")
_JOBS = flags.DEFINE_integer(
    "jobs", None, "Runs at a time, each with its share of the cores (default: 2, if there are)."
)
_LIST = flags.DEFINE_bool("list", False, "Lists runs with state, minutes and command, and ends.")
_RUN = flags.DEFINE_bool("run", True, "--norun: writes the page of what is there.")
_SMOKE = flags.DEFINE_bool("smoke", False, "Sizes at which nothing is measured: do all commands go through?")


def main(_: Sequence[str]) -> None:
    """Runs, judges, writes and prints."""
    from rrl.studies.reproduction.reproduce import reproduce, seeds_of

    out = _OUT.value or ("runs/reproduce-smoke" if _SMOKE.value else "runs/reproduce")
    page = _PAGE.value or f"{out}/reproduction.md"
    told = [f"--{flag.name}" for flag in (_SMOKE,) if flag.value]
    told += [f"--seeds={','.join(_SEEDS.value)}"] * _SEEDS.present + [f"--out={out}"] * _OUT.present
    told += [f"--keep={_KEEP.value}"] * _KEEP.present
    done = reproduce(
        pathlib.Path(out),
        pathlib.Path(page),
        keep=pathlib.Path(_KEEP.value) if _KEEP.value else None,
        only=_ONLY.value,
        seeds=seeds_of(_SEEDS.value),
        jobs=_JOBS.value,
        smoke=_SMOKE.value,
        listed=_LIST.value,
        run=_RUN.value,
        command=shlex.join(["python", "launch/reproduce.py", *told]),
    )
    launcher.exit_after_runs(done.failed, done.stopped, done.retryable)


if __name__ == "__main__":
    launcher.run(main)
