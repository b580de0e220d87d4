"""Tables that compare finished evaluations, and the Markdown report made of them.

Read `tables` first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rrl.eval.comparison import comparability_notes, is_comparable, shared_settings
from rrl.eval.evaluation_run import EvaluationRun
from rrl.eval.timing import STAGES

COSTS = (
    "searches",
    "turns",
    "tokens",
    "prompt_tokens",
    "environment_tokens",
    "reader_prompt_tokens",
    "reader_tokens",
    "tokens_when_correct",
    "tokens_per_correct",
    "all_tokens_per_correct",
)
"""Costs that tables show. "tokens" are those that the policy sampled."""
RETRIEVAL = (
    "recall",
    "full_recall",
    "map",
    "hits",
    "mrr",
    "passages",
    "eta_re",
    "hits_by_answer",
    "mrr_by_answer",
)
"""Metrics of retrieval that tables show (see `rrl.retrieval.gold`). "passages" is the mean number
of retrieved passages. "eta_re" is R2AG's efficiency (Table A.6). "..._by_answer" treats the first
passage that contains a gold answer as the gold passage."""

Table = list[tuple[str, ...]]
"""The rows of a table in a report; the first is its head."""


def main_table(runs: Sequence[EvaluationRun], rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of each run's metrics with intervals, and the difference of the main metric from the first run's."""
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.metrics))
    main = runs[0].main_metric
    against = f"{main} against the first"
    table: Table = [("run", "model", *metrics, *([against] if len(runs) > 1 else []))]
    for run, row in zip(runs, rows, strict=True):
        cells = [run.name + ("" if is_comparable(runs[0], run) else " *"), run.card.model]
        for metric in metrics:
            cells.append(_interval(row, metric) if metric in row else "–")
        if len(runs) > 1:
            cells.append(_difference(row, main))
        table.append(tuple(cells))
    return table


def cost_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of searches, turns and tokens (means over questions), and tokens per right answer; [] if none are known."""
    names = [name for name in COSTS if any(name in row for row in rows)]
    table: Table = [("per question", *map(_words, names))]
    table += [(row["run"], *(f"{row[name]:.2f}" if name in row else "–" for name in names)) for row in rows]
    return table if names else []


def retrieval_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the metrics in `RETRIEVAL`, with intervals if they are known; [] if no run has any of them.

    Its last column is the difference of full recall from the first run's, if a run has one.
    """
    names = [name for name in RETRIEVAL if any(name in row for row in rows)]
    known = [row for row in rows if any(name in row for name in names)]
    if not known:
        return []
    tested = any("full_recall_p" in row for row in known)
    table: Table = [("run", *map(_words, names), *["full recall against the first"] * tested)]
    for row in known:
        shown = [_retrieval_cell(row, name) if name in row else "–" for name in names]
        table.append((row["run"], *shown, *[_difference(row, "full_recall")] * tested))
    return table


def _retrieval_cell(row: Mapping[str, Any], name: str) -> str:
    if name == "passages":
        return f"{row[name]:.2f}"
    return _interval(row, name) if f"{name}_low" in row else f"{100 * row[name]:.1f}"


def group_table(runs: Sequence[EvaluationRun], group: str) -> Table:
    """Return a table of the main metric by kind (`group` "by_kind") or by hops ("by_hops"), with numbers of questions.

    The numbers of a run are left out if they equal those of the first. Returns [] if no run has the groups.
    """
    labels = sorted({label for run in runs for label in run.report.get(group, {})})
    if not labels:
        return []
    table: Table = [(f"{runs[0].main_metric} {_words(group)}", *map(_words, labels))]
    for run in runs:
        parts = run.report.get(group, {})
        shown = (f"{100 * parts[label][run.main_metric]:.1f}" if label in parts else "–" for label in labels)
        table.append((run.name, *shown))
    first_counts = _group_sizes(runs[0], group, labels)
    table.append(("questions", *first_counts))
    for run in runs[1:]:
        counts = _group_sizes(run, group, labels)
        if counts != first_counts:
            table.append((f"questions of {run.name}", *counts))
    return table


def _group_sizes(run: EvaluationRun, group: str, labels: Sequence[str]) -> tuple[str, ...]:
    """Return the number of questions with each label, as text."""
    parts = run.report.get(group, {})
    return tuple(str(parts[label]["questions"]) if label in parts else "–" for label in labels)


def time_table(runs: Sequence[EvaluationRun]) -> Table:
    """Return a table of seconds per question by stage; [] if no run has any."""
    stages = [s for s in STAGES if any(s in r.report.get("seconds", {}) for r in runs)]
    table: Table = [("seconds per question, batched", *stages, "questions measured")]
    for run in runs:
        seconds = run.report.get("seconds", {})
        shown = (f"{seconds[s]:.3f}" if s in seconds else "–" for s in stages)
        # An interrupted batch has no time, so a resumed run has times for only some of its questions.
        table.append((run.name, *shown, str(run.report.get("timed", "–"))))
    return table if stages else []


def tables(runs: Sequence[EvaluationRun], rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return all tables of a report, in order."""
    candidates = [
        main_table(runs, rows),
        group_table(runs, "by_kind"),
        group_table(runs, "by_hops"),
        retrieval_table(rows),
        cost_table(rows),
        time_table(runs),
    ]
    return [table for table in candidates if table]


def as_markdown(runs: Sequence[EvaluationRun], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a report in Markdown: settings shared by all runs, the main table, notes on comparability, the other tables."""
    lines = [f"- {part}: {value}" for part, value in shared_settings(runs)]
    first, *others = tables(runs, rows)
    lines += ["", "Percent, with intervals over questions.", "", *_markdown(first)]
    if notes := comparability_notes(runs):
        lines += ["", "\\* not directly comparable with the first row, or with failures:", ""]
        lines += [f"- {note}" for note in notes]
    for table in others:
        lines += ["", *_markdown(table)]
    return "\n".join(lines) + "\n"


def _markdown(table: Table) -> list[str]:
    head, *body = [[cell.replace("|", "\\|").replace("*", "\\*") for cell in row] for row in table]
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *body)]


def _interval(row: Mapping[str, Any], metric: str) -> str:
    return f"{100 * row[metric]:.1f} [{100 * row[f'{metric}_low']:.1f}, {100 * row[f'{metric}_high']:.1f}]"


def _difference(row: Mapping[str, Any], metric: str) -> str:
    if f"{metric}_p" not in row:
        return "–"
    low, high = 100 * row[f"{metric}_difference_low"], 100 * row[f"{metric}_difference_high"]
    return f"{100 * row[f'{metric}_difference']:+.1f} [{low:+.1f}, {high:+.1f}], p = {row[f'{metric}_p']:.2g}"


def _words(name: str) -> str:
    return name.replace("_", " ")
