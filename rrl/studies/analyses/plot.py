"""Plots an analysis: answer metrics with intervals, costs and retrieval metrics by varied value or by arm, and
training curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rrl.report.curves import band, band_caption
from rrl.report.figures import COLOURS, add_caption, legend_below, new_figure, save_figure, style_axis
from rrl.studies.analyses.catalogue import Analysis
from rrl.studies.analyses.rows import AnalysisRow
from rrl.studies.sweep import COST_TITLES, RATE_TITLES

ValueWithInterval = tuple[float, float, float]
"""(mean, distance to the lower end of its interval, distance to the upper end)."""
METRICS = {"em": "exact match", "f1": "F1", "acc": "accuracy", "judge": "correct according to the judge"}
"""Metric -> title of its panel."""


def plot_analysis(
    analysis: Analysis,
    rows: Sequence[AnalysisRow],
    logs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    png: Path,
) -> None:
    """Write the plot.

    Args:
      analysis: the analysis.
      rows: the rows of its table.
      logs: arm -> for each seed, the lines of its training run's metrics.jsonl.
      png: the file to write.
    """
    metrics = [name for name in METRICS if all(name in row.metrics for row in rows)]
    costs_and_retrieval = [
        name for name in (*RATE_TITLES, *COST_TITLES) if any(name in row.costs_and_coverage for row in rows)
    ]
    logged = {name for runs in logs.values() for lines in runs for line in lines for name in line}
    curve_names = [name for name in analysis.curves if name in logged]
    columns = 3
    count = len(metrics) + len(costs_and_retrieval) + len(curve_names)
    title = f"{analysis.title} ({analysis.source}): {rows[0].runs[0].card.dataset}"
    figure, axes = new_figure(-(-count // columns), columns, title)
    panels = iter(axes)
    for name in metrics:
        axis = next(panels)
        _draw_panel(axis, analysis, rows, f"{METRICS[name]} (percent)", [_percent(row, name) for row in rows])
    for name in costs_and_retrieval:
        axis, scale = next(panels), 100 if name in RATE_TITLES else 1
        title_of_panel = RATE_TITLES[name] + " (percent)" if name in RATE_TITLES else COST_TITLES[name]
        _draw_panel(
            axis,
            analysis,
            rows,
            title_of_panel,
            [(scale * row.costs_and_coverage.get(name, np.nan), 0.0, 0.0) for row in rows],
        )
        # The axis starts at 0 and leaves a margin of 10 % above the highest point.
        axis.set_ylim(0, 1.1 * axis.dataLim.y1 or 1)
    smoothed = 0
    for name in curve_names:
        axis = next(panels)
        style_axis(axis, analysis.curves[name])
        for arm, runs in logs.items():
            smoothed = max(smoothed, band(axis, runs, name, "step", arm, _colours(rows)[arm]))
        legend_below(axis)
    for axis in panels:
        axis.set_axis_off()
    if curve_names:
        add_caption(figure, band_caption(max(map(len, logs.values()), default=1), smoothed))
    save_figure(figure, png)


def _percent(row: AnalysisRow, name: str) -> ValueWithInterval:
    """Return a row's metric in percent."""
    value = row.metrics[name]
    return 100 * value.mean, 100 * (value.mean - value.low), 100 * (value.high - value.mean)


def _draw_panel(
    axis: Any,
    analysis: Analysis,
    rows: Sequence[AnalysisRow],
    title: str,
    measured: Sequence[ValueWithInterval],
) -> None:
    """Draw one panel. `measured` has one entry per row."""
    systems = list(dict.fromkeys(row.point.system for row in rows))
    values = list(dict.fromkeys(row.point.value for row in rows)) if analysis.varies else systems
    style_axis(axis, title, analysis.varies.replace("_", " ") or " ")
    x_of_value = {value: float(index) for index, value in enumerate(values)}
    numeric = all(value.isdigit() for value in values)
    if numeric:
        x_of_value = {value: float(value) for value in values}
    slanted = sum(map(len, values)) > 24
    axis.set_xticks(
        list(x_of_value.values()), values, rotation=25 if slanted else 0, ha="right" if slanted else "center"
    )
    margin = 0.5 if len(x_of_value) > 1 else 1.0
    axis.set_xlim(min(x_of_value.values()) - margin, max(x_of_value.values()) + margin)
    for index, (system, colour) in enumerate(_colours(rows).items()):
        of_system = [
            (row, value) for row, value in zip(rows, measured, strict=True) if row.point.system == system
        ]
        # Points of several systems at one x are shifted sideways, so that their intervals do not overlap.
        shift = (0.06 if numeric else 0.16) * (index - (len(systems) - 1) / 2) if analysis.varies else 0.0
        x = [x_of_value[row.point.value if analysis.varies else system] + shift for row, _ in of_system]
        mean, low, high = np.array([value for _, value in of_system]).T
        line = "-" if numeric and len(of_system) > 1 else ""
        axis.errorbar(
            x, mean, (low, high), fmt=f"o{line}", color=colour, label=system, markersize=4, capsize=2
        )
    if analysis.varies and len(systems) > 1:
        legend_below(axis)


def _colours(rows: Sequence[AnalysisRow]) -> dict[str, str]:
    """Return the colour of each policy or arm; it is the same in all panels."""
    systems = dict.fromkeys(row.point.system for row in rows)
    return {system: COLOURS[index % len(COLOURS)] for index, system in enumerate(systems)}
