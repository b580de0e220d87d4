"""Report scores: means with intervals, means by kind and by hops, retrieval, costs, and paired comparisons of two runs.

Read `report` and `as_text` first.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from rrl.errors import UserError
from rrl.eval.intervals import bootstrap, compare
from rrl.eval.scoring import OTHER_TOKENS, Scores
from rrl.files import atomic_stream, saving
from rrl.report.summary import table

CUTS = (2, 5, 10)
"""Ranks at which retrieval is reported, in addition to all retrieved passages."""

REPORT_WARNINGS = (
    ("missing", "questions without a prediction count as wrong"),
    ("judge_unparsed", "verdicts of the judge could not be parsed and count as wrong"),
    ("short_unread", "answers are scored in full, because their short forms could not be parsed"),
    (
        "searches_failed",
        "searches failed and returned no passages: repair the index or its service, and evaluate into another --workdir",
    ),
)
"""Counts in a report that make its metrics less reliable: (key, explanation)."""
VALUE_GROUPS = (
    ("cost", "cost per question", 1),
    ("ended", "ended by, percent", 100),
    ("seconds", "seconds per question, batched", 1),
)
"""Parts of a report that are shown on one line: (key, heading, factor by which values are multiplied for display)."""
RETRIEVAL_GROUPS = (
    ("retrieval", "gold passages, percent"),
    ("retrieval_by_answer", "first passage with an answer, percent"),
)
"""Parts of a report with retrieval metrics at several ranks: (key, heading)."""


def report(scores: Scores, *, seed: int = 0, level: float = 0.95) -> dict[str, Any]:
    """Return means with bootstrap intervals, means by kind and by hops, retrieval and cost, as plain values for JSON."""
    summary: dict[str, Any] = {
        "questions": len(scores.questions),
        "missing": scores.missing,
        "level": level,
        "metrics": {
            name: dataclasses.asdict(bootstrap(values, level=level, seed=seed))
            for name, values in scores.metrics.items()
        },
    }
    if "judge" in scores.metrics:
        summary["judge_unparsed"] = scores.unparsed
    if scores.failed_searches:
        summary["searches_failed"] = scores.failed_searches
    groups = {
        "by_kind": [q.kind for q in scores.questions],
        "by_hops": [str(q.hops) if q.hops else "" for q in scores.questions],
    }
    for name, labels in groups.items():
        if any(labels):
            summary[name] = {label or "other": _means(scores, labels, label) for label in sorted(set(labels))}
    by, warning = scores.gold_key_and_warning
    if warning:
        summary["retrieval_warning"] = warning
    if scores.hits is not None:
        summary["retrieval"] = scores.hits.report(CUTS)
        summary["retrieval_by"] = by
        summary["retrieval_intervals"] = {
            name: dataclasses.asdict(bootstrap(values[~np.isnan(values)], level=level, seed=seed))
            for name, values in scores.retrieval_metrics.items()
        }
    summary["cost"] = costs(scores.counts, scores.metrics[scores.main_metric])
    return summary


def costs(counts: Mapping[str, Float[np.ndarray, "Q"]], right: Float[np.ndarray, "Q"]) -> dict[str, float]:
    """Return means of the counts over the questions and, if any answer is right, the tokens that a right answer costs.

    - tokens_per_correct: sampled tokens of all questions, divided by the number of right answers.
    - tokens_when_correct: mean number of sampled tokens of the questions that are answered right.
    - all_tokens_per_correct: as tokens_per_correct, with `OTHER_TOKENS` included.
    """
    means = {name: float(values.mean()) for name, values in counts.items()}
    answers = float(right.sum())
    if "tokens" in counts and answers:
        means["tokens_per_correct"] = float(counts["tokens"].sum()) / answers
        means["tokens_when_correct"] = float(counts["tokens"] @ right / answers)
        if others := [counts[name] for name in OTHER_TOKENS if name in counts]:
            means["all_tokens_per_correct"] = float(counts["tokens"].sum() + np.sum(others)) / answers
    return means


def compare_scores(scores: Scores, baseline: Scores, *, seed: int = 0, level: float = 0.95) -> dict[str, Any]:
    """Compare a run with a baseline on the same questions: a paired comparison for each metric that both have.

    A difference is the mean of `scores` less the mean of `baseline`, as in `rrl.eval.intervals.compare(baseline, scores)`.

    Metrics of retrieval are compared only if both runs recognise gold passages in the same way (`gold_key_and_warning`).
    """
    same_key = scores.gold_key_and_warning[0] == baseline.gold_key_and_warning[0]
    metrics, baseline_metrics = (
        {**run.metrics, **(run.retrieval_metrics if same_key else {})} for run in (scores, baseline)
    )
    # Retrieval metrics are NaN for a question without gold passages.
    defined = {name: ~np.isnan(values) for name, values in metrics.items()}
    return {
        name: dataclasses.asdict(
            compare(baseline_metrics[name][defined[name]], values[defined[name]], level=level, seed=seed)
        )
        for name, values in metrics.items()
        if name in baseline_metrics
    }


def as_text(summary: Mapping[str, Any]) -> str:
    """Return a report as text."""
    level = f"{100 * summary['level']:g} %"
    rows = [("", "mean", f"{level} interval")]
    rows += [
        (name, f"{100 * interval['mean']:.1f}", f"{100 * interval['low']:.1f} – {100 * interval['high']:.1f}")
        for name, interval in summary["metrics"].items()
    ]
    lines = [f"{summary['questions']} questions, percent", *table(rows)]
    for group, title in (("by_kind", "kind"), ("by_hops", "hops")):
        if group in summary:
            names = list(summary["metrics"])
            body = [
                (label, str(means["questions"]), *(f"{100 * means[name]:.1f}" for name in names))
                for label, means in summary[group].items()
            ]
            lines += ["", *table([(title, "questions", *names), *body])]
    for name, heading in RETRIEVAL_GROUPS:
        if values := summary.get(name):
            lines += ["", *_retrieval_lines(values, heading, level, summary.get(f"{name}_intervals", {}))]
            if by := summary.get(f"{name}_by"):
                lines.append(f"by {by}")
    if warning := summary.get("retrieval_warning"):
        lines += ["", f"gold passages: {warning}"]
    for name, heading, scale in VALUE_GROUPS:
        if values := summary.get(name):
            decimals = 3 if name == "seconds" else 2
            shown = (f"{key} {value * scale:.{decimals}f}" for key, value in values.items())
            lines += ["", f"{heading}: {'   '.join(shown)}"]
            if name == "seconds" and (timed := summary.get("timed", 0)) < summary["questions"] and timed:
                lines[-1] += f"   (measured on {timed} of them)"
    for name, test in summary.get("against", {}).items():
        lines += [
            "",
            f"{name} against {summary['against_file']}: {100 * test['difference']:+.1f} ({level} interval "
            f"{100 * test['low']:+.1f} – {100 * test['high']:+.1f}), p = {test['p']:.4g} ({test['test']}); "
            f"better on {test['better']}, worse on {test['worse']}, the same on {test['same']}",
        ]
    for line in report_warnings(summary):
        lines += ["", line]
    return "\n".join(lines)


def report_warnings(summary: Mapping[str, Any]) -> list[str]:
    """Return a line for each kind of failure in a report; [] if there was none."""
    return [f"{summary[name]:,} {words}" for name, words in REPORT_WARNINGS if summary.get(name)]


def _retrieval_lines(
    metrics: Mapping[str, float], title: str, level: str, intervals: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Return a table with a row per metric: its mean over all retrieved passages with the interval, and its mean at each rank.

    A last line has the metrics without ranks: number of distinct passages and eta_re. `level` is the confidence level as text,
    such as "95 %".
    """
    names = [name for name in metrics if f"{name}@{CUTS[0]}" in metrics]
    body = [
        [name, *(f"{100 * metrics[name + cut]:.1f}" for cut in ("", *(f"@{k}" for k in CUTS)))]
        for name in names
    ]
    head = [title, "all", *(f"@{k}" for k in CUTS)]
    if intervals:
        head.insert(2, f"{level} interval")
        for row in body:
            interval = intervals[row[0]]
            row.insert(2, f"{100 * interval['low']:.1f} – {100 * interval['high']:.1f}")
    lines = table([head, *body])
    if "passages" in metrics:
        lines.append(f"different passages {metrics['passages']:.2f}   eta_re {100 * metrics['eta_re']:.2f}")
    return lines


def write_report(folder: str | Path, summary: Mapping[str, Any], scores: Scores) -> None:
    """Write metrics.json (the report) and scores.jsonl (a line per question) into the folder, each atomically.

    Metrics of retrieval are null for a question without gold passages. Raises UserError if the folder cannot be made, and
    SaveError if a file cannot be written.
    """
    folder, lines, retrieval = Path(folder), [], scores.retrieval_metrics
    for at, question in enumerate(scores.questions):
        values = {
            name: None if np.isnan(column[at]) else float(column[at])
            for columns in (scores.metrics, scores.counts, retrieval)
            for name, column in columns.items()
        }
        lines.append(
            json.dumps({"id": question.id, "kind": question.kind, "hops": question.hops} | values) + "\n"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={str(folder)!r} cannot be made ({error}); give another folder") from error
    text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
    for name, content in (("scores.jsonl", "".join(lines)), ("metrics.json", text)):
        with saving(folder / name), atomic_stream(folder / name) as stream:
            stream.write(content.encode())


def _means(scores: Scores, labels: Sequence[str], label: str) -> dict[str, float]:
    these = np.array([other == label for other in labels])
    means = {name: float(values[these].mean()) for name, values in scores.metrics.items()}
    return {"questions": int(these.sum())} | means
