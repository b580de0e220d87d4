"""Compare finished evaluations: metrics with intervals, paired tests against the first, and notes on what is not comparable.

Read `comparison_rows` first; `rrl.eval.comparison_tables` shows its rows as tables.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rrl.errors import UserError
from rrl.eval.evaluation_run import EvaluationRun
from rrl.eval.intervals import PairedComparison, bootstrap, compare
from rrl.eval.result_card import UNKNOWN_CORPUS, differences
from rrl.eval.score_report import REPORT_WARNINGS, report_warnings
from rrl.retrieval.gold import TITLES


def paired_test(
    first: EvaluationRun, run: EvaluationRun, metric: str, level: float = 0.95, seed: int = 0
) -> PairedComparison | None:
    """Compare `run` with `first` on the same questions by a metric of answers or of retrieval.

    Returns None if the questions differ, if one run lacks the metric, or if `run` is `first`; for a metric of retrieval also if
    the gold passages differ, if they are recognised in different ways (by ids or titles), or if no question has a value in both
    runs. Raises UserError if the runs list their questions in different orders.
    """
    first_values, second_values = (
        {**each.metrics, **each.retrieval_metrics}.get(metric) for each in (first, run)
    )
    if run is first or first_values is None or second_values is None:
        return None
    if first.card.questions_sha256 != run.card.questions_sha256:
        return None
    if metric in first.retrieval_metrics and not _same_gold_passages(first, run):
        return None
    if list(first.ids) != list(run.ids):
        raise UserError(
            f"the scores.jsonl of the runs {first.name} and {run.name} are in different orders; run their commands again, which "
            "write them"
        )
    defined = ~(np.isnan(first_values) | np.isnan(second_values))  # recall is undefined without gold passages
    if not defined.any():
        return None
    return compare(first_values[defined], second_values[defined], level=level, seed=seed)


def _same_gold_passages(first: EvaluationRun, run: EvaluationRun) -> bool:
    """Return whether two runs have the same gold passages and recognise them in the same way, by ids or titles.

    An older result card has no hash of the gold passages (""). Its gold passages are assumed to be the same.
    """
    hashes = {each.card.gold_sha256 for each in (first, run)} - {""}
    keys = {each.report.get("retrieval_by", TITLES) for each in (first, run) if each.retrieval_metrics}
    return len(hashes) < 2 and len(keys) < 2


def comparability_notes(runs: Sequence[EvaluationRun]) -> list[str]:
    """Return notes on what makes the runs not comparable (corpus, retriever, questions, ...) and on failures in each run."""
    unknown = [run.name for run in runs if run.card.corpus and not run.card.corpus_sha256]
    lines = differences({run.name: run.card for run in runs})
    if unknown and len(runs) > 1:
        lines.append(f"corpus unknown for {', '.join(unknown)}: {UNKNOWN_CORPUS}, so it may differ")
    return lines + [f"{run.name}: {line}" for run in runs for line in report_warnings(run.report)]


def is_comparable(first: EvaluationRun, run: EvaluationRun) -> bool:
    """Return whether a run has the same setting as the first and no failures."""
    return not (differences({"first": first.card, "run": run.card}) or report_warnings(run.report))


def shared_settings(runs: Sequence[EvaluationRun]) -> list[tuple[str, str]]:
    """Return (name, value) of the settings that are the same in all runs, as text."""
    different = {line.partition(" differs: ")[0] for line in comparability_notes(runs)}
    return [(part, value) for part, value in runs[0].card.setting.items() if part not in different]


def comparison_rows(
    runs: Sequence[EvaluationRun], level: float = 0.95, seed: int = 0
) -> list[dict[str, Any]]:
    """Return one flat record per run: card, metrics with intervals, differences from the first run with p, retrieval, costs."""
    return [
        _identifying_fields(runs[0], run) | _metric_fields(runs[0], run, level, seed) | _report_fields(run)
        for run in runs
    ]


def _identifying_fields(first: EvaluationRun, run: EvaluationRun) -> dict[str, Any]:
    """Return what was evaluated, and whether it is comparable with the first run."""
    card = run.card
    return {
        "run": run.name,
        "method": card.method,
        "model": card.model,
        "dataset": card.dataset,
        "questions": card.questions,
        "corpus": card.corpus,
        "corpus_passages": card.passages,
        "retriever": card.retriever.get("kind", ""),
        "top_k": card.top_k,
        "seed": card.seed,
        "normalization": card.normalization,
        "comparable": is_comparable(first, run),
    }


def _metric_fields(first: EvaluationRun, run: EvaluationRun, level: float, seed: int) -> dict[str, Any]:
    """Return mean and interval of each metric, and its difference from the first run's with p."""
    fields: dict[str, Any] = {}
    for metric, values in (*run.metrics.items(), *run.retrieval_metrics.items()):
        interval = bootstrap(values[~np.isnan(values)], level=level, seed=seed)
        fields |= {metric: interval.mean, f"{metric}_low": interval.low, f"{metric}_high": interval.high}
        test = paired_test(first, run, metric, level, seed)
        if test is not None:
            fields |= {
                f"{metric}_difference": test.difference,
                f"{metric}_difference_low": test.low,
                f"{metric}_difference_high": test.high,
                f"{metric}_p": test.p,
            }
    return fields


def _report_fields(run: EvaluationRun) -> dict[str, Any]:
    """Return failures, retrieval, costs and seconds from a run's report."""
    fields: dict[str, Any] = {name: run.report.get(name, 0) for name, _ in REPORT_WARNINGS}
    fields |= run.report.get("retrieval", {}) | run.report.get("cost", {})
    by_answer = run.report.get("retrieval_by_answer", {})
    fields |= {f"{name}_by_answer": value for name, value in by_answer.items()}
    return fields | {f"seconds_{stage}": value for stage, value in run.report.get("seconds", {}).items()}


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the records as CSV with a column for every field."""
    fields = list(dict.fromkeys(field for row in rows for field in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
