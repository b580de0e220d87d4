"""An analysis in one call: what is missing is run, and table and plot are written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rrl.errors import UserError
from rrl.eval.evaluate import EvaluationSettings
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
"""Where the reproduction trains, whose runs analyses of training use and add to; smoke runs apart."""


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
    """Runs what the analysis lacks and writes table.md, table.csv and plot.png into `out`, also when a signal ended the runs.

    Evaluations of policies that are there have their folders in `out`, training runs in `shared` (default: the reproduction's
    folder). What `keep` has of these (docs/reproduction: what was measured for the published page) is not run again.
    `policies`, `values`, `arguments` and `fields`: see `rrl.studies.analyses.catalogue.evaluation_points`. `listed`: prints what
    would be run instead. `run` false: writes table and plot of what is there.

    Raises UserError for an unknown analysis, for what does not go with it, and as
    `rrl.studies.reproduction.queue.run_queue`, before anything is written; and where no row of the table is finished.
    """
    analysis = analysis_named(what)
    if analysis.arms:
        if policies or values or arguments or fields:
            raise UserError(
                f"what={what!r} trains its own policies: leave out --policy, --values, --arguments and --set"
            )
        points, known = training_points(analysis, seeds, smoke)
        root, settings = shared or Path(SHARED[smoke]), []
    else:
        if keep is not None:
            raise UserError(f"what={what!r} evaluates policies that are there: leave out --keep")
        points, known = evaluation_points(analysis, policies, values, arguments, fields, smoke)
        root = out
        settings = [
            EvaluationSettings.of(
                load_config(each.config, [f"{field}={value}" for field, value in each.fields.items()])
            )
            for each in known.values()
        ]
    jobs = jobs if jobs is not None else min(2, available_cores())
    names = [name for point in points for name in point.runs]
    kept = None if keep is None else MeasurementStore(keep, known)
    todo = with_dependencies(names, known) if kept is None else kept.missing_runs(names, root)
    if listed:
        print(list_of(todo, known, root, jobs))
        return QueueResult({})
    if run and any(row["state"] != "finished" for row in run_states(todo, root)):
        _require_services(settings)
    done = run_queue(todo, root, jobs) if run else QueueResult({})
    there = {row["name"] for row in run_states(todo, root) if row["state"] == "finished"}
    old = (
        {}
        if kept is None
        else {n: kept.evaluation_run(n) for n in names if n in kept.entries and n not in there}
    )
    there |= set(old)
    whole = [point for point in points if there.issuperset(point.runs)]
    if not whole and (done.failed or done.stopped):
        return done
    rows = load_rows(whole, root, points[0], old)
    missing = [f"{point.system} {point.value}".strip() for point in points if point not in whole]

    def lines_of(evaluation: str) -> Sequence[Mapping[str, Any]]:
        name = evaluation.removesuffix("-eval")
        if kept is not None and evaluation in old:
            return kept.entries[name].training if name in kept.entries else ()
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
    if curves and (lost := [words for name, words in analysis.curves.items() if name not in logged]):
        print(
            f"not drawn over the updates, for what is kept of these runs does not have it: {', '.join(lost)}"
        )
    print(f"{text}\n{out}/plot.png")
    return done


def _require_services(settings: Sequence[EvaluationSettings]) -> None:
    """Raises UserError for a search service that does not answer, which each run would find for itself."""
    services = {(each.retriever.index, each.retriever.form): each for each in settings if each.searches}
    for (index, _), each in services.items():
        if index.startswith("http"):
            load_retriever((), each.retriever, None, each.rollout.search_seconds)
