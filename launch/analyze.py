"""Runs one of the papers' analyses: `python launch/analyze.py --what=top_k --policy=runs/NAME/policy [--out=FOLDER]`.

Executes the missing runs and writes table.md, table.csv and plot.png, which name the corresponding figures and tables of the
papers. Some analyses evaluate given policies at several values of one field (max_steps, top_k, retrievers, tokens). The others
train policies by several methods over seeds; launch/reproduce.py uses the same training runs. The same command continues an
interrupted analysis.
"""

import pathlib
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from rrl.runs import launcher

_WHAT = flags.DEFINE_string("what", None, "Name of the analysis; docs/evaluation.md lists them.")
_OUT = flags.DEFINE_string(
    "out",
    None,
    "Folder of table, plot and evaluations (default: runs/analysis-WHAT, with -smoke for smoke runs).",
)
_POLICY = flags.DEFINE_list(
    "policy", [], "Policies to evaluate: METHOD@FOLDER, or a FOLDER whose recipe card names the method."
)
_VALUES = flags.DEFINE_string(
    "values", "", "Values of the varied field, such as 1,3,5 or 1-10 or bm25,exact@FOLDER."
)
_ARGUMENTS = flags.DEFINE_list(
    "arguments", [], "Further arguments of configs/eval.py, such as dataset=FILE,questions=200."
)
_SET = flags.DEFINE_multi_string(
    "set", [], "FIELD=VALUE: sets a config field of all evaluations, such as rollout.rows=32."
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Training seeds.")
_RUNS = flags.DEFINE_string(
    "runs", None, "Folder of the training runs (default: that of launch/reproduce.py)."
)
_KEEP = flags.DEFINE_string(
    "keep",
    None,
    "Folder of stored measurements, such as docs/reproduction; their runs are not executed again.",
)
_JOBS = flags.DEFINE_integer(
    "jobs",
    None,
    "Number of runs at a time, each on its share of the cores (default: 2, or 1 on a single core).",
)
_LIST = flags.DEFINE_bool("list", False, "Lists the runs with state, minutes and command, and exits.")
_RUN = flags.DEFINE_bool(
    "run", True, "--norun: executes nothing, and writes table and plot of the finished runs."
)
_SMOKE = flags.DEFINE_bool("smoke", False, "Uses tiny sizes, which only check that all commands complete.")
flags.mark_flags_as_required(["what"])


def main(_: Sequence[str]) -> None:
    """Run the analysis and print its table."""
    from rrl.errors import UserError
    from rrl.studies.analyses.analyze import analyze
    from rrl.studies.analyses.plan import AnalysisFolders
    from rrl.studies.analyses.points import EvaluationOptions
    from rrl.studies.reproduction.options import RunOptions, parse_seeds
    from rrl.studies.sweep import values_of

    if wrong := [field for field in _SET.value if "=" not in field]:
        raise UserError(f"--set={wrong[0]} must be FIELD=VALUE, such as rollout.rows=32")
    what = _WHAT.value or ""
    folders = AnalysisFolders(
        out=pathlib.Path(_OUT.value or f"runs/analysis-{what}" + "-smoke" * _SMOKE.value),
        training=pathlib.Path(_RUNS.value) if _RUNS.value else None,
        store=pathlib.Path(_KEEP.value) if _KEEP.value else None,
    )
    options = RunOptions(
        seeds=parse_seeds(_SEEDS.value),
        jobs=_JOBS.value,
        smoke=_SMOKE.value,
        list_only=_LIST.value,
        execute=_RUN.value,
    )
    evaluation = EvaluationOptions(
        policies=_POLICY.value,
        values=values_of(_VALUES.value) if _VALUES.present else (),
        arguments=_ARGUMENTS.value,
        fields=dict(field.split("=", 1) for field in _SET.value),
    )
    command = shlex.join(["python", "launch/analyze.py", *sys.argv[1:]])
    outcome = analyze(what, folders, options, evaluation, command)
    launcher.exit_after_runs(outcome.failed, outcome.stopped, outcome.retryable)


if __name__ == "__main__":
    launcher.run(main)
