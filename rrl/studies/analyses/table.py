"""Write the table of an analysis as Markdown and as CSV."""

from collections.abc import Mapping, Sequence

from rrl.eval.comparison import as_csv, comparability_notes, comparison_rows, shared_settings
from rrl.eval.comparison_tables import COSTS
from rrl.eval.intervals import Interval
from rrl.studies.analyses.catalogue import Analysis
from rrl.studies.analyses.rows import AnalysisRow
from rrl.studies.reproduction.page import SMOKE_NOTE, markdown


def analysis_markdown(
    analysis: Analysis,
    rows: Sequence[AnalysisRow],
    command: str,
    missing: Sequence[str] = (),
    smoke: bool = False,
) -> str:
    """Return the table as Markdown: above it the settings that all rows share, below it those in which they differ."""
    runs = [run for row in rows for run in row.runs]
    first = rows[0]
    lines = [f"# {analysis.title}: {analysis.source}", "", f"Made by `{command}`.", ""]
    lines += [SMOKE_NOTE, ""] * smoke
    lines += [f"- dataset: {first.runs[0].card.dataset}"]
    lines += [f"- {part}: {value}" for part, value in shared_settings(runs)]
    lines += [f"- limits of {system}: {limits}" for system, limits in _limits(rows).items()]
    seeds = max(len(row.runs) for row in rows)
    interval_basis = (
        "over questions"
        if seeds == 1
        else "over questions or seeds, whichever is wider, followed by the value of each seed"
    )
    lines += ["", f"Percent, with 95 % intervals {interval_basis}.", ""]
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    costs = [name for name in COSTS if any(name in row.costs_and_coverage for row in rows)]
    retrieval = [
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
        *(name.replace("_", " ") for name in costs + retrieval),
    ]
    table: list[Sequence[str]] = [head]
    for row in rows:
        cells = [row.point.system, *([row.point.value] if varied else [])]
        cells += [_metric(row, name) for name in metrics]
        cells.append(_signed(row.difference) if row.difference is not None else "–")
        cells += [_cost_or_coverage(row.costs_and_coverage, name) for name in costs + retrieval]
        table.append(cells)
    lines += markdown(table)
    if notes := comparability_notes(runs):
        lines += ["", "Rows differ in:", "", *(f"- {note}" for note in notes)]
    if missing:
        lines += ["", "Not measured yet:", "", *(f"- {name}" for name in missing)]
    return "\n".join(lines) + "\n"


def analysis_csv(rows: Sequence[AnalysisRow]) -> str:
    """Return one CSV line per run, with all fields of `comparison_rows`."""
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
