"""Builds the table of an analysis: one row per policy or arm and value, with means over seeds, intervals,
costs and retrieval coverage."""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from rrl.errors import UserError
from rrl.eval.comparison import as_csv, comparability_notes, comparison_rows, shared_settings
from rrl.eval.comparison_tables import COSTS, RETRIEVAL
from rrl.eval.evaluation_run import EvaluationRun, load_run
from rrl.eval.intervals import Interval, bootstrap, student
from rrl.studies.analyses.catalogue import Analysis, AnalysisPoint
from rrl.studies.reproduction.page import SMOKE_NOTE, markdown


@dataclasses.dataclass(frozen=True)
class AnalysisRow:
    """The measurements of one point."""

    point: AnalysisPoint
    runs: Sequence[EvaluationRun]
    """One evaluation per seed."""
    metrics: Mapping[str, Interval]
    """em, f1, ... in [0, 1], with intervals."""
    difference: Interval | None
    """Main metric of this row minus that of the first row, paired by question and seed. None in the first row;
    also None if the first row is not finished or if the questions differ."""
    costs_and_coverage: Mapping[str, float]
    """Costs and retrieval coverage, as means over seeds."""


def load_rows(
    points: Sequence[AnalysisPoint],
    out: Path,
    first: AnalysisPoint,
    stored: Mapping[str, EvaluationRun] = types.MappingProxyType({}),
) -> list[AnalysisRow]:
    """Return the rows of these points.

    Args:
      points: finished points.
      out: folder of the runs.
      first: the point that the others are compared with, if it is among `points`.
      stored: run -> its evaluation from a measurement store; other runs are read from `out`.

    Raises:
      UserError: `points` is empty, the runs of one point have different questions, or `load_run` cannot
        read a run.
    """
    if not points:
        raise UserError(f"{out}: no run of this analysis is finished in this folder; leave out --norun")
    loaded = {
        point: [stored[name] if name in stored else load_run(out / name) for name in point.runs]
        for point in points
    }
    base = loaded.get(first)
    rows = []
    for point, runs in loaded.items():
        if len({run.card.questions_sha256 for run in runs}) > 1:
            raise UserError(
                f"the runs {', '.join(point.runs)} answered different questions; delete those that are out of date"
            )
        names = [name for name in runs[0].metrics if all(name in run.metrics for run in runs)]
        metrics = {name: _clipped(interval([run.metrics[name] for run in runs])) for name in names}
        difference = None if base is None or runs is base else _difference(base, runs)
        rows.append(AnalysisRow(point, runs, metrics, difference, _costs_and_coverage(runs)))
    return rows


def interval(columns: Sequence[Float[np.ndarray, "Q"]]) -> Interval:
    """Return the mean over seeds and questions, with its interval.

    `columns` has one array per seed. The interval covers both the bootstrap over questions and Student's t over
    seeds.
    """
    questions = bootstrap(np.mean(columns, axis=0))
    if len(columns) < 2:
        return questions
    seeds = student([column.mean() for column in columns])
    return dataclasses.replace(
        questions, low=min(questions.low, seeds.low), high=max(questions.high, seeds.high)
    )


def _clipped(interval: Interval) -> Interval:
    """Clip an interval to [0, 1], which Student's t may exceed."""
    return dataclasses.replace(interval, low=max(0.0, interval.low), high=min(1.0, interval.high))


def _difference(first: Sequence[EvaluationRun], runs: Sequence[EvaluationRun]) -> Interval | None:
    main = first[0].main_metric
    if any(
        run.card.questions_sha256 != first[0].card.questions_sha256 or main not in run.metrics for run in runs
    ):
        return None
    pairs = [(first[at % len(first)], runs[at % len(runs)]) for at in range(max(len(first), len(runs)))]
    return interval([run.metrics[main] - base.metrics[main] for base, run in pairs])


def _costs_and_coverage(runs: Sequence[EvaluationRun]) -> dict[str, float]:
    measured = [{**run.report.get("retrieval", {}), **run.report.get("cost", {})} for run in runs]
    names = [name for name in (*COSTS, *RETRIEVAL) if all(name in each for each in measured)]
    return {name: float(np.mean([each[name] for each in measured])) for name in names}


def analysis_markdown(
    analysis: Analysis,
    rows: Sequence[AnalysisRow],
    command: str,
    missing: Sequence[str] = (),
    smoke: bool = False,
) -> str:
    """Return the table as Markdown: above it the settings that all rows share, below it those in which
    they differ."""
    runs = [run for row in rows for run in row.runs]
    first = rows[0]
    lines = [f"# {analysis.title}: {analysis.source}", "", f"Made by `{command}`.", ""]
    lines += [SMOKE_NOTE, ""] * smoke
    lines += [f"- dataset: {first.runs[0].card.dataset}"]
    lines += [f"- {part}: {value}" for part, value in shared_settings(runs)]
    lines += [f"- limits of {system}: {limits}" for system, limits in _limits(rows).items()]
    seeds = max(len(row.runs) for row in rows)
    over = (
        "over questions"
        if seeds == 1
        else "over questions or seeds, whichever is wider, followed by the value of each seed"
    )
    lines += ["", f"Percent, with 95 % intervals {over}.", ""]
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    costs = [name for name in COSTS if any(name in row.costs_and_coverage for row in rows)]
    coverage = [
        name
        for name in ("recall", "full_recall", "passages")
        if any(name in row.costs_and_coverage for row in rows)
    ]
    main = first.runs[0].main_metric
    varied = [analysis.varies.replace("_", " ")] if analysis.varies else []
    head = [
        "",
        *varied,
        *metrics,
        f"{main} against the first",
        *(name.replace("_", " ") for name in costs + coverage),
    ]
    table: list[Sequence[str]] = [head]
    for row in rows:
        cells = [row.point.system, *([row.point.value] if varied else [])]
        cells += [_metric(row, name) for name in metrics]
        cells.append(_signed(row.difference) if row.difference is not None else "–")
        cells += [_cost_or_coverage(row.costs_and_coverage, name) for name in costs + coverage]
        table.append(cells)
    lines += markdown(table)
    if notes := comparability_notes(runs):
        lines += ["", "Rows differ in:", "", *(f"- {note}" for note in notes)]
    if missing:
        lines += ["", "Not measured yet:", "", *(f"- {name}" for name in missing)]
    return "\n".join(lines) + "\n"


def analysis_csv(rows: Sequence[AnalysisRow]) -> str:
    """Return one CSV line per run, with all fields of its report record."""
    runs = [run for row in rows for run in row.runs]
    keys = [{"system": row.point.system, "value": row.point.value} for row in rows for _ in row.runs]
    return as_csv([{**key, **record} for key, record in zip(keys, comparison_rows(runs), strict=True)])


def _limits(rows: Sequence[AnalysisRow]) -> dict[str, str]:
    """Return, for each policy or arm, the limits that all its runs share."""
    shared_limits: dict[str, dict[str, int]] = {}
    for row in rows:
        for run in row.runs:
            shared = shared_limits.setdefault(row.point.system, dict(run.card.limits))
            for name in [name for name in shared if run.card.limits.get(name) != shared[name]]:
                del shared[name]
    texts = {
        system: ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in limits.items())
        for system, limits in shared_limits.items()
    }
    alike = len(set(texts.values())) == 1
    return {"all rows": next(iter(texts.values()))} if alike and len(texts) > 1 else texts


def _metric(row: AnalysisRow, name: str) -> str:
    if name not in row.metrics:
        return "–"
    value = row.metrics[name]
    seeds = f"; {', '.join(f'{100 * run.metrics[name].mean():.1f}' for run in row.runs)}" * (
        len(row.runs) > 1
    )
    return f"{100 * value.mean:.1f} [{100 * value.low:.1f}, {100 * value.high:.1f}]{seeds}"


def _signed(interval: Interval) -> str:
    return f"{100 * interval.mean:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


def _cost_or_coverage(values: Mapping[str, float], name: str) -> str:
    if name not in values:
        return "–"
    return f"{100 * values[name]:.1f}" if name.endswith("recall") else f"{values[name]:.2f}"
