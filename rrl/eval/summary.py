"""What a run did, in a few lines of plain text: before and after, by kind of question, and what it cost."""

from collections.abc import Mapping, Sequence
from typing import Any


def summary(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    run: Mapping[str, Any] | None = None,
    reference: tuple[str, float] | None = None,
    temperature: float = 0.0,
    files: Sequence[str] = (),
) -> str:
    """The table printed at the end of a run.

    `before` and `after` hold "eval/em", "eval/f1", "eval/searches" and the same with "/<kind>" as fractions (searches
    as a count), `run` holds facts to list ("steps", "minutes", "tokens/s" ...). `reference` is (what it is, exact match
    as a fraction) to print beside the result, `temperature` that of the evaluation. Metrics that are missing are shown
    as "–".
    """
    kinds = sorted({name.split("/", 2)[2] for name in (*before, *after) if name.startswith("eval/em/")})
    rows: list[tuple[str, ...]] = [
        ("", "EM before", "after", "gain", "F1 before", "after", "searches before", "after")
    ]
    for kind in [*kinds, ""]:
        tail = f"/{kind}" if kind else ""
        em = before.get(f"eval/em{tail}"), after.get(f"eval/em{tail}")
        f1 = before.get(f"eval/f1{tail}"), after.get(f"eval/f1{tail}")
        searches = before.get(f"eval/searches{tail}"), after.get(f"eval/searches{tail}")
        gain = "–" if em[0] is None or em[1] is None else f"{100 * (em[1] - em[0]):+.1f}"
        numbers = (*map(_percent, em), gain, *map(_percent, f1), *map(_count, searches))
        rows.append((kind.replace("_", " ") or "all", *numbers))
    lines = [
        f"Held-out questions, {decoding(temperature)} (percent)",
        *table(rows, rule_before_last=bool(kinds)),
    ]
    if reference:
        lines.append(f"{reference[0]}: EM {_percent(reference[1])}")
    if run:
        lines += ["", "   ".join(f"{name} {_fact(value)}" for name, value in run.items())]
    if files:
        lines += ["", *files]
    return "\n".join(lines)


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
