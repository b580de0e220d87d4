"""Runs one analysis: executes the missing runs and writes the table and the plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rrl.errors import UserError
from rrl.eval.settings import EvaluationSettings
from rrl.files import atomic_stream, saving
from rrl.parallel.runtime import available_cores
from rrl.runs.datasets import load_retriever
from rrl.runs.launcher import load_config
from rrl.runs.metrics import read_metrics
from rrl.studies.analyses.catalogue import analysis_named, evaluation_points, training_points
from rrl.studies.analyses.plot import draw
from rrl.studies.analyses.table import analysis_csv, analysis_markdown, load_rows
from rrl.studies.reproduction.page import describe_runs
from rrl.studies.reproduction.plan import with_dependencies
from rrl.studies.reproduction.queue import QueueResult, run_queue, run_states
from rrl.studies.reproduction.store import MeasurementStore

TRAINING_FOLDERS = {False: "runs/reproduce", True: "runs/reproduce-smoke"}
"""Whether it is a smoke run -> default folder of the training runs. launch/reproduce.py has the same default,
so each training run is executed only once."""


def analyze(
    what: str,
    out: Path,
    *,
    policies: Sequence[str] = (),
    values: Sequence[str] = (),
    arguments: Sequence[str] = (),
    fields: Mapping[str, Any] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    shared: Path | None = None,
    keep: Path | None = None,
    jobs: int | None = None,
    smoke: bool = False,
    list_only: bool = False,
    run: bool = True,
    command: str = "python launch/analyze.py",
) -> QueueResult:
    """Execute the missing runs of an analysis and write table.md, table.csv and plot.png into `out`.

    The files are also written if a signal ended the runs. Evaluations of existing policies are
    executed in `out`. Training runs and the evaluations of their policies are executed in `shared`.

    Args:
      what: name of the analysis; see `rrl.studies.analyses.catalogue.ANALYSES`.
      out: folder of table, plot and evaluations.
      policies, values, arguments, fields: see `rrl.studies.analyses.catalogue.evaluation_points`.
      seeds: training seeds.
      shared: folder of training runs and the evaluations of their policies; default: the folder of
        launch/reproduce.py.
      keep: folder of a `MeasurementStore`, such as docs/reproduction with the published measurements.
        Runs that it holds are not executed again.
      jobs: number of runs at a time; default: 2, or 1 on a single core.
      smoke: use sizes that only check whether all commands complete.
      list_only: print the runs that would be executed, and do nothing else.
      run: if false, execute nothing and write table and plot of the finished runs.
      command: the command that the table names as its origin.

    Raises:
      UserError: an unknown analysis, arguments that do not apply to it, wrong input as in `run_queue`
        (before anything is written), or no finished row.
    """
    analysis = analysis_named(what)
    if analysis.arms:
        if policies or values or arguments or fields:
            raise UserError(
                f"what={what!r} trains its own policies: leave out --policy, --values, --arguments and --set"
            )
        points, planned = training_points(analysis, seeds, smoke)
        root, settings = shared or Path(TRAINING_FOLDERS[smoke]), []
    else:
        if keep is not None:
            raise UserError(f"what={what!r} evaluates existing policies: leave out --keep")
        points, planned = evaluation_points(analysis, policies, values, arguments, fields, smoke)
        root = out
        settings = [
            EvaluationSettings.parse(
                load_config(
                    planned_run.config,
                    [f"{field}={value}" for field, value in planned_run.fields.items()],
                )
            )
            for planned_run in planned.values()
        ]
    jobs = jobs if jobs is not None else min(2, available_cores())
    names = [name for point in points for name in point.runs]
    store = None if keep is None else MeasurementStore(keep, planned)
    todo = with_dependencies(names, planned) if store is None else store.missing_runs(names, root)
    if list_only:
        print(describe_runs(todo, planned, root, jobs))
        return QueueResult({})
    if run and any(row["state"] != "finished" for row in run_states(todo, root)):
        _require_services(settings)
    outcome = run_queue(todo, root, jobs) if run else QueueResult({})
    finished = {row["name"] for row in run_states(todo, root) if row["state"] == "finished"}
    stored = (
        {}
        if store is None
        else {
            name: store.evaluation_run(name)
            for name in names
            if name in store.entries and name not in finished
        }
    )
    finished |= set(stored)
    complete = [point for point in points if finished.issuperset(point.runs)]
    if not complete and (outcome.failed or outcome.stopped):
        return outcome
    rows = load_rows(complete, root, points[0], stored)
    missing = [f"{point.system} {point.value}".strip() for point in points if point not in complete]

    def training_metrics(evaluation: str) -> Sequence[Mapping[str, Any]]:
        """Return the metrics.jsonl lines of the run that trained the evaluated policy; empty if there are none."""
        name = evaluation.removesuffix("-eval")
        if store is not None and evaluation in stored:
            return store.entries[name].training if name in store.entries else ()
        file = root / name / "metrics.jsonl"
        return read_metrics(file) if file.is_file() else ()

    logs = {
        row.point.system: [training_metrics(name) for name in row.point.runs] for row in rows if analysis.arms
    }
    curves = {arm: lines_by_seed for arm, lines_by_seed in logs.items() if all(lines_by_seed)}
    text = analysis_markdown(analysis, rows, command, missing, smoke)
    for name, content in (("table.md", text), ("table.csv", analysis_csv(rows))):
        with saving(out / name):
            out.mkdir(parents=True, exist_ok=True)
            with atomic_stream(out / name) as stream:
                stream.write(content.encode())
    with saving(out / "plot.png"):
        draw(analysis, rows, curves, out / "plot.png")
    logged = {
        name
        for lines_by_seed in curves.values()
        for lines in lines_by_seed
        for line in lines
        for name in line
    }
    if curves and (
        missing_curves := [title for name, title in analysis.curves.items() if name not in logged]
    ):
        print(
            f"not plotted, because the stored measurements of these runs lack them: {', '.join(missing_curves)}"
        )
    print(f"{text}\n{out}/plot.png")
    return outcome


def _require_services(settings: Sequence[EvaluationSettings]) -> None:
    """Raise UserError if a search service does not respond. Otherwise each run would start and fail separately."""
    services = {(each.retriever.index, each.retriever.form): each for each in settings if each.searches}
    for (index, _), each in services.items():
        if index.startswith("http"):
            load_retriever((), each.retriever, None, each.rollout.search_seconds)
