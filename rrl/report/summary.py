"""What a run did, in a few lines of plain text: before and after, by kind of question, and what it cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from scipy.stats import binomtest

FEW = 100
"""Held-out questions below which a table shows its interval."""
ANSWERS = (("EM", "em", True), ("F1", "f1", True), ("searches", "searches", False))
"""Columns: title, metric, and whether it is a share."""
PASSAGES = (
    ("full recall", "full_recall", True),
    ("recall", "recall", True),
    ("mAP", "map", True),
    ("@K", "passages", False),
    ("iterations", "iterations", False),
)
"""Of a recipe that is told by what it finds (R2AG)."""


def summary(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    run: Mapping[str, Any] | None = None,
    reference: tuple[str, float] | None = None,
    temperature: float = 0.0,
    files: Sequence[str] = (),
    questions: int = 0,
    note: str = "",
) -> str:
    """The table printed at the end of a run.

    `before` and `after` hold "eval/em", "eval/f1", "eval/searches" and the same with "/<kind>" as fractions (searches
    as a count); where "eval/full_recall" is among them, `PASSAGES` are shown too. `run` holds facts to list ("steps",
    "minutes", "tokens/s" ...). `reference` is (what it is, exact match as a fraction) to print beside the result,
    `temperature` that of the evaluation. Metrics that are missing are shown as "–". Of fewer than `FEW` held-out `questions` the
    interval is printed, too (0: their number is not known), and a `note` below the table.
    """
    lines = [f"Held-out questions, {decoding(temperature)} (percent)", *_compared(ANSWERS, before, after)]
    if "eval/full_recall" in {*before, *after}:
        lines += [
            "",
            "Passages found (percent; @K and iterations: numbers)",
            *_compared(PASSAGES, before, after),
        ]
    shares = [found["eval/em"] for found in (before, after) if "eval/em" in found]
    if 0 < questions < FEW and shares:
        lines.append(_uncertain(questions, shares))
    if note:
        lines.append(f"{note[:1].upper()}{note[1:]}.")
    if reference:
        lines.append(f"{reference[0]}: EM {_percent(reference[1])}")
    if run:
        lines += ["", "   ".join(f"{name} {_fact(value)}" for name, value in run.items())]
    if files:
        lines += ["", *files]
    return "\n".join(lines)


def _uncertain(questions: int, shares: Sequence[float]) -> str:
    """Wilson's interval of a share of so few questions, before and after."""
    intervals = [
        binomtest(round(share * questions), questions).proportion_ci(method="wilson") for share in shares
    ]
    words = " before, ".join(f"{_percent(found.low)} to {_percent(found.high)}" for found in intervals)
    return f"Only {questions} questions. 95% interval of EM: {words}{' after' if len(intervals) > 1 else ''}."


def _compared(
    columns: Sequence[tuple[str, str, bool]], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[str]:
    """A table of metrics before and after, by kind of question; the first with its gain."""
    kinds = sorted({name.split("/", 2)[2] for name in (*before, *after) if name.startswith("eval/em/")})
    head = [""]
    for place, (title, _, _) in enumerate(columns):
        head += [f"{title} before", "after", *([] if place else ["gain"])]
    rows = [tuple(head)]
    for kind in [*kinds, ""]:
        row = [kind.replace("_", " ") or "all"]
        for place, (_, metric, share) in enumerate(columns):
            name = f"eval/{metric}" + (f"/{kind}" if kind else "")
            old, new = before.get(name), after.get(name)
            row += map(_percent if share else _count, (old, new))
            if not place:
                row.append("–" if old is None or new is None else f"{100 * (new - old):+.1f}")
        rows.append(tuple(row))
    return table(rows, rule_before_last=bool(kinds))


def decoding(temperature: float) -> str:
    """How an evaluation chose its tokens, in words."""
    return f"temperature {temperature:g}" if temperature else "greedy decoding"


def table(rows: Sequence[Sequence[str]], rule_before_last: bool = False) -> list[str]:
    """Lines with aligned columns: the first row is the head, the first column is left-aligned, the others right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
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
