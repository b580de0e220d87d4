"""Summarise a run in a few lines of text: metrics before and after, by kind of question, and costs."""

from collections.abc import Mapping, Sequence
from typing import Any

FEW_QUESTIONS = 100
"""With fewer held-out questions than this, a summary shows the interval of EM."""
ANSWER_COLUMNS = (("EM", "em", True), ("F1", "f1", True), ("searches", "searches", False))
"""Columns on answers: (title, metric, whether it is a fraction, which is shown in percent)."""
PASSAGE_COLUMNS = (
    ("full recall", "full_recall", True),
    ("recall", "recall", True),
    ("mAP", "map", True),
    ("@K", "passages", False),
    ("iterations", "iterations", False),
)
"""Columns on retrieval, for recipes that are measured by it (R2AG). "@K" is R2AG's name for the mean number of passages found."""


def summary(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    facts: Mapping[str, Any] | None = None,
    reference: tuple[str, float] | None = None,
    temperature: float = 0.0,
    files: Sequence[str] = (),
    questions: int = 0,
    note: str = "",
) -> str:
    """Return the table that is printed at the end of a run. Missing metrics are shown as "–".

    Args:
      before: metrics "eval/em", "eval/f1" (fractions), "eval/searches" (a count), and the same for each kind of question, such as
        "eval/em/<kind>". If it has "eval/full_recall", `PASSAGE_COLUMNS` are shown too.
      after: the same metrics, measured after the run.
      facts: facts of the run to list, such as "steps", "minutes" and "tokens/s".
      reference: (name, exact match as a fraction) of a result to compare with.
      temperature: temperature of the evaluation.
      files: files to list.
      questions: number of held-out questions, 0 if not known. Below `FEW_QUESTIONS` the interval of EM is shown.
      note: a note below the table.
    """
    lines = [
        f"Held-out questions, {decoding(temperature)} (percent)",
        *_comparison_table(ANSWER_COLUMNS, before, after),
    ]
    if "eval/full_recall" in {*before, *after}:
        lines += [
            "",
            "Passages found (percent; @K and iterations: numbers)",
            *_comparison_table(PASSAGE_COLUMNS, before, after),
        ]
    exact_matches = [metrics["eval/em"] for metrics in (before, after) if "eval/em" in metrics]
    if 0 < questions < FEW_QUESTIONS and exact_matches:
        lines.append(_interval_line(questions, exact_matches))
    if note:
        lines.append(f"{note[:1].upper()}{note[1:]}.")
    if reference:
        lines.append(f"{reference[0]}: EM {_percent(reference[1])}")
    if facts:
        lines += ["", "   ".join(f"{name} {_fact(value)}" for name, value in facts.items())]
    if files:
        lines += ["", *files]
    return "\n".join(lines)


def _interval_line(questions: int, exact_matches: Sequence[float]) -> str:
    """Return a line with Wilson's interval of EM, before and after."""
    from scipy.stats import binomtest  # takes a second to import, and is first needed at the end of a run

    intervals = [
        binomtest(round(em * questions), questions).proportion_ci(method="wilson") for em in exact_matches
    ]
    intervals_text = " before, ".join(
        f"{_percent(interval.low)} to {_percent(interval.high)}" for interval in intervals
    )
    return f"Only {questions} questions. 95% interval of EM: {intervals_text}{' after' if len(intervals) > 1 else ''}."


def _comparison_table(
    columns: Sequence[tuple[str, str, bool]], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[str]:
    """Return a table of metrics before and after, by kind of question, with a column for the gain of the first metric."""
    kinds = sorted({name.split("/", 2)[2] for name in (*before, *after) if name.startswith("eval/em/")})
    head = [""]
    for column, (title, _, _) in enumerate(columns):
        head += [f"{title} before", "after", *([] if column else ["gain"])]
    rows = [tuple(head)]
    for kind in [*kinds, ""]:
        row = [kind.replace("_", " ") or "all"]
        for column, (_, metric, fraction) in enumerate(columns):
            name = f"eval/{metric}" + (f"/{kind}" if kind else "")
            old, new = before.get(name), after.get(name)
            row += map(_percent if fraction else _count, (old, new))
            if not column:
                row.append("–" if old is None or new is None else f"{100 * (new - old):+.1f}")
        rows.append(tuple(row))
    return table(rows, rule_before_last=bool(kinds))


def decoding(temperature: float) -> str:
    """Return how an evaluation sampled its tokens, such as "greedy decoding"."""
    return f"temperature {temperature:g}" if temperature else "greedy decoding"


def table(rows: Sequence[Sequence[str]], rule_before_last: bool = False) -> list[str]:
    """Return lines with aligned columns. The first row is the head; the first column is left-aligned, the others right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]
    rule = "─" * len(lines[0])
    body = [*lines[1:-1], rule, lines[-1]] if rule_before_last else lines[1:]
    return [lines[0], rule, *body]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
