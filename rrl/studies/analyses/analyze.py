"""Run one analysis: execute the missing runs and write the table and the plot."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rrl.files import atomic_stream, saving
from rrl.studies.analyses.catalogue import Analysis, analysis_named
from rrl.studies.analyses.plan import AnalysisFolders, AnalysisPlan, plan_analysis
from rrl.studies.analyses.plot import plot_analysis
from rrl.studies.analyses.points import EvaluationOptions
from rrl.studies.analyses.rows import AnalysisRow, load_rows
from rrl.studies.analyses.table import analysis_csv, analysis_markdown
from rrl.studies.reproduction.manifest import run_states
from rrl.studies.reproduction.options import RunOptions
from rrl.studies.reproduction.page import describe_runs
from rrl.studies.reproduction.plan import PlannedRun
from rrl.studies.reproduction.queue import QueueResult, run_queue

Curves = Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]
"""Arm -> for each seed, the lines of its training run's metrics.jsonl."""


def analyze(
    what: str,
    folders: AnalysisFolders,
    options: RunOptions,
    evaluation: EvaluationOptions,
    command: str = "python launch/analyze.py",
) -> QueueResult:
    """Execute the missing runs of an analysis and write table.md, table.csv and plot.png into `folders.out`.

    The files are also written if a run failed or a signal ended the runs, unless no row is finished.

    Args:
      what: name of the analysis; see `rrl.studies.analyses.catalogue.ANALYSES`.
      folders: where the runs are executed and the results are written.
      options: seeds, sizes, and which runs are executed.
      evaluation: policies and values, for an analysis of existing policies.
      command: the command that the table names as its origin.

    Raises:
      UserError: an unknown analysis, options that do not apply to it, wrong input as in `run_queue` (before anything is written),
        or no finished row.
    """
    analysis = analysis_named(what)
    plan = plan_analysis(what, analysis, folders, evaluation, options)
    todo = plan.runs_to_execute()
    if options.list_only:
        print(describe_runs(todo, plan.planned, plan.folder, options.jobs_or_default))
        return QueueResult({})
    outcome = _execute(plan, todo, options.jobs_or_default) if options.execute else QueueResult({})
    finished = {row["name"] for row in run_states(todo, plan.folder) if row["state"] == "finished"}
    stored = plan.stored_evaluations(finished)
    complete = [point for point in plan.points if (finished | set(stored)).issuperset(point.runs)]
    if not complete and (outcome.failed or outcome.stopped):
        return outcome
    rows = load_rows(complete, plan.folder, plan.points[0], stored)
    missing = [f"{point.system} {point.value}".strip() for point in plan.points if point not in complete]
    curves = _training_curves(plan, rows, stored)
    text = analysis_markdown(analysis, rows, command, missing, options.smoke)
    _write_results(folders.out, analysis, rows, curves, text)
    _print_missing_curves(analysis, curves)
    print(f"{text}\n{folders.out}/plot.png")
    return outcome


def _execute(plan: AnalysisPlan, todo: Sequence[PlannedRun], jobs: int) -> QueueResult:
    if any(row["state"] != "finished" for row in run_states(todo, plan.folder)):
        plan.require_services()
    return run_queue(todo, plan.folder, jobs)


def _training_curves(plan: AnalysisPlan, rows: Sequence[AnalysisRow], stored: Collection[str]) -> Curves:
    """Return the training curves of the arms. An arm is left out if the curve of one of its seeds is missing.

    `stored` are the names of the evaluations that were read from the store.
    """
    if not plan.analysis.arms:
        return {}
    curves = {
        row.point.system: [plan.training_metrics(name, name in stored) for name in row.point.runs]
        for row in rows
    }
    return {arm: lines_by_seed for arm, lines_by_seed in curves.items() if all(lines_by_seed)}


def _write_results(
    out: Path, analysis: Analysis, rows: Sequence[AnalysisRow], curves: Curves, markdown: str
) -> None:
    for name, content in (("table.md", markdown), ("table.csv", analysis_csv(rows))):
        with saving(out / name):
            out.mkdir(parents=True, exist_ok=True)
            with atomic_stream(out / name) as stream:
                stream.write(content.encode())
    with saving(out / "plot.png"):
        plot_analysis(analysis, rows, curves, out / "plot.png")


def _print_missing_curves(analysis: Analysis, curves: Curves) -> None:
    """Print the titles of the curves that are not plotted because no training run logged them."""
    logged = {name for runs in curves.values() for lines in runs for line in lines for name in line}
    if curves and (missing := [title for name, title in analysis.curves.items() if name not in logged]):
        print(f"not plotted, because the stored measurements of these runs lack them: {', '.join(missing)}")
