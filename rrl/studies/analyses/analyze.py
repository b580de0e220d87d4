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
from rrl.studies.analyses.table import as_text, csv_of, load_rows
from rrl.studies.reproduction.page import list_of
from rrl.studies.reproduction.plan import with_dependencies
from rrl.studies.reproduction.queue import QueueResult, run_queue, run_states
from rrl.studies.reproduction.store import MeasurementStore

SHARED = {False: "runs/reproduce", True: "runs/reproduce-smoke"}
"""Smoke run or not -> default folder of training runs. It is the reproduction's folder, so that its runs
are shared."""


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
    listed: bool = False,
    run: bool = True,
    command: str = "python launch/analyze.py",
) -> QueueResult:
    """Execute the missing runs of an analysis and write table.md, table.csv and plot.png into `out`.

    The files are also written if a signal ended the runs. Evaluations of existing policies have their
    folders in `out`; training runs have theirs in `shared`.

    Args:
      what: name of the analysis; see `rrl.studies.analyses.catalogue.ANALYSES`.
      out: folder of table, plot and evaluations.
      policies, values, arguments, fields: see `rrl.studies.analyses.catalogue.evaluation_points`.
      seeds: training seeds.
      shared: folder of training runs; default: that of the reproduction.
      keep: folder of a measurement store (docs/reproduction: the published measurements), whose runs
        are not executed again.
      jobs: number of runs at a time; default: 2, or 1 on a single core.
      smoke: use sizes that only check whether all commands complete.
      listed: print the runs that would be executed, and do nothing else.
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
        root, settings = shared or Path(SHARED[smoke]), []
    else:
        if keep is not None:
            raise UserError(f"what={what!r} evaluates existing policies: leave out --keep")
        points, planned = evaluation_points(analysis, policies, values, arguments, fields, smoke)
        root = out
        settings = [
            EvaluationSettings.of(
                load_config(each.config, [f"{field}={value}" for field, value in each.fields.items()])
            )
            for each in planned.values()
        ]
    jobs = jobs if jobs is not None else min(2, available_cores())
    names = [name for point in points for name in point.runs]
    store = None if keep is None else MeasurementStore(keep, planned)
    todo = with_dependencies(names, planned) if store is None else store.missing_runs(names, root)
    if listed:
        print(list_of(todo, planned, root, jobs))
        return QueueResult({})
    if run and any(row["state"] != "finished" for row in run_states(todo, root)):
        _require_services(settings)
    done = run_queue(todo, root, jobs) if run else QueueResult({})
    finished = {row["name"] for row in run_states(todo, root) if row["state"] == "finished"}
    stored = (
        {}
        if store is None
        else {n: store.evaluation_run(n) for n in names if n in store.entries and n not in finished}
    )
    finished |= set(stored)
    complete = [point for point in points if finished.issuperset(point.runs)]
    if not complete and (done.failed or done.stopped):
        return done
    rows = load_rows(complete, root, points[0], stored)
    missing = [f"{point.system} {point.value}".strip() for point in points if point not in complete]

    def lines_of(evaluation: str) -> Sequence[Mapping[str, Any]]:
        name = evaluation.removesuffix("-eval")
        if store is not None and evaluation in stored:
            return store.entries[name].training if name in store.entries else ()
        file = root / name / "metrics.jsonl"
        return read_metrics(file) if file.is_file() else ()

    logs = {row.point.system: [lines_of(name) for name in row.point.runs] for row in rows if analysis.arms}
    curves = {arm: seeds for arm, seeds in logs.items() if all(seeds)}
    text = as_text(analysis, rows, command, missing, smoke)
    for name, content in (("table.md", text), ("table.csv", csv_of(rows))):
        with saving(out / name):
            out.mkdir(parents=True, exist_ok=True)
            with atomic_stream(out / name) as stream:
                stream.write(content.encode())
    with saving(out / "plot.png"):
        draw(analysis, rows, curves, out / "plot.png")
    logged = {name for arm in curves.values() for lines in arm for line in lines for name in line}
    if curves and (
        missing_curves := [title for name, title in analysis.curves.items() if name not in logged]
    ):
        print(
            f"not plotted, because the stored measurements of these runs lack them: {', '.join(missing_curves)}"
        )
    print(f"{text}\n{out}/plot.png")
    return done


def _require_services(settings: Sequence[EvaluationSettings]) -> None:
    """Raises UserError for a search service that does not answer, which each run would find for itself."""
    services = {(each.retriever.index, each.retriever.form): each for each in settings if each.searches}
    for (index, _), each in services.items():
        if index.startswith("http"):
            load_retriever((), each.retriever, None, each.rollout.search_seconds)
