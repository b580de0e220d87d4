"""The measurements of an analysis: one row per policy or arm and value, with means over seeds, intervals, costs and retrieval
metrics. Read `load_rows` first."""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from rrl.errors import UserError
from rrl.eval.comparison_tables import COSTS, RETRIEVAL
from rrl.eval.evaluation_run import EvaluationRun, load_run
from rrl.eval.intervals import Interval, bootstrap, student
from rrl.studies.analyses.points import AnalysisPoint


@dataclasses.dataclass(frozen=True)
class AnalysisRow:
    """The measurements of one point."""

    point: AnalysisPoint
    runs: Sequence[EvaluationRun]
    """One evaluation per seed."""
    metrics: Mapping[str, Interval]
    """em, f1, ... in [0, 1], with intervals."""
    difference: Interval | None
    """Main metric of this row minus that of the first row, paired by question and seed. None in the first row; also None if the
    first row is not finished or if the questions differ."""
    costs_and_coverage: Mapping[str, float]
    """Costs (`COSTS`) and retrieval metrics (`RETRIEVAL` of `rrl.eval.comparison_tables`), as means over seeds."""


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
      UserError: `points` is empty, the runs of one point have different questions, or `load_run` cannot read a run.
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
        metrics = {name: _clipped(mean_interval([run.metrics[name] for run in runs])) for name in names}
        difference = None if base is None or runs is base else _difference(base, runs)
        rows.append(AnalysisRow(point, runs, metrics, difference, _costs_and_coverage(runs)))
    return rows


def mean_interval(columns: Sequence[Float[np.ndarray, "Q"]]) -> Interval:
    """Return the mean over seeds and questions, with its interval.

    `columns` has one array per seed. The interval covers both the bootstrap over questions and Student's t over seeds.
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
    """Return the main metric of `runs` minus that of `first`; None if their questions differ or a run lacks the metric.

    The runs are paired in the order of their seeds. A row with a single run is paired with each run of the other row.
    """
    main = first[0].main_metric
    if any(
        run.card.questions_sha256 != first[0].card.questions_sha256 or main not in run.metrics for run in runs
    ):
        return None
    pairs = [
        (first[index % len(first)], runs[index % len(runs)]) for index in range(max(len(first), len(runs)))
    ]
    return mean_interval([run.metrics[main] - base.metrics[main] for base, run in pairs])


def _costs_and_coverage(runs: Sequence[EvaluationRun]) -> dict[str, float]:
    measured = [{**run.report.get("retrieval", {}), **run.report.get("cost", {})} for run in runs]
    names = [name for name in (*COSTS, *RETRIEVAL) if all(name in each for each in measured)]
    return {name: float(np.mean([each[name] for each in measured])) for name in names}
