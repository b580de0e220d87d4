"""An analysis of the papers: `python launch/analyze.py --what=top_k --policy=runs/NAME/policy [--out=FOLDER]`.

Runs what is missing and ends in table.md, table.csv and plot.png, with the papers' figures and tables named. Some analyses vary a
value of an evaluation for given policies (max_steps, top_k, retrievers, tokens); the others train policies in different ways over
seeds, beside the reproduction's runs, which they share. The same command continues what was broken off.
"""

import pathlib
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from rrl.runs import launcher

_WHAT = flags.DEFINE_string("what", None, "The analysis: see docs/evaluation.md.")
_OUT = flags.DEFINE_string(
    "out", None, "Folder of table, plot and evaluations (default: runs/analysis-WHAT, of smoke runs -smoke)."
)
_POLICY = flags.DEFINE_list(
    "policy", [], "Policies that are evaluated: FOLDER, whose recipe card says the method, or METHOD@FOLDER."
)
_VALUES = flags.DEFINE_string(
    "values", "", "Values of what is varied, such as 1,3,5 or 1-10 or bm25,exact@FOLDER."
)
_ARGUMENTS = flags.DEFINE_list(
    "arguments", [], "Arguments of configs/eval.py, such as dataset=FILE,questions=200."
)
_SET = flags.DEFINE_multi_string(
    "set", [], "A field of all evaluations, such as rollout.rows=32; may be repeated."
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of training.")
_RUNS = flags.DEFINE_string(
    "runs", None, "Folder of the training runs (default: that of launch/reproduce.py)."
)
_KEEP = flags.DEFINE_string(
    "keep", None, "Folder of kept results (docs/reproduction), whose runs are not done again."
)
_JOBS = flags.DEFINE_integer(
    "jobs", None, "Runs at a time, each with its share of the cores (default: 2, if there are)."
)
_LIST = flags.DEFINE_bool("list", False, "Lists runs with state, minutes and command, and ends.")
_RUN = flags.DEFINE_bool("run", True, "--norun: writes table and plot of what is there.")
_SMOKE = flags.DEFINE_bool("smoke", False, "Sizes at which nothing is measured: do all commands go through?")
flags.mark_flags_as_required(["what"])


def main(_: Sequence[str]) -> None:
    """Runs, writes and prints."""
    from rrl.errors import UserError
    from rrl.studies.analyses.analyze import analyze
    from rrl.studies.reproduction.reproduce import seeds_of
    from rrl.studies.sweep import values_of

    if wrong := [field for field in _SET.value if "=" not in field]:
        raise UserError(f"--set={wrong[0]} must be FIELD=VALUE, such as rollout.rows=32")
    what = _WHAT.value or ""
    done = analyze(
        what,
        pathlib.Path(_OUT.value or f"runs/analysis-{what}" + "-smoke" * _SMOKE.value),
        policies=_POLICY.value,
        values=values_of(_VALUES.value) if _VALUES.present else (),
        arguments=_ARGUMENTS.value,
        fields=dict(field.split("=", 1) for field in _SET.value),
        seeds=seeds_of(_SEEDS.value),
        shared=pathlib.Path(_RUNS.value) if _RUNS.value else None,
        keep=pathlib.Path(_KEEP.value) if _KEEP.value else None,
        jobs=_JOBS.value,
        smoke=_SMOKE.value,
        listed=_LIST.value,
        run=_RUN.value,
        command=shlex.join(["python", "launch/analyze.py", *sys.argv[1:]]),
    )
    launcher.exit_after_runs(done.failed, done.stopped, done.retryable)


if __name__ == "__main__":
    launcher.run(main)
