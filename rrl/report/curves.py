"""Plot curves of a run over its steps (R-Search, Figure 3), and of several arms with their spread over seeds. An arm is one
variant of a run in a comparison.

Read `plot_training` and `plot_spread` first.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rrl.errors import UserError
from rrl.recipes.base import Curves
from rrl.report.figures import (
    COLOURS,
    INK,
    QUIET,
    add_caption,
    legend_below,
    new_figure,
    save_figure,
    style_axis,
)
from rrl.report.summary import decoding
from rrl.runs.metrics import read_metrics

MetricRows = Sequence[Mapping[str, Any]]
MetricsSource = MetricRows | str | pathlib.Path
"""Rows of metrics, each with "step", or the path of a metrics.jsonl."""


@dataclasses.dataclass(frozen=True)
class _Panel:
    """One plot of a figure."""

    title: str
    lines: Mapping[str, str]
    """Training metrics and their labels, drawn as lines."""
    held_out: tuple[str, str] = ("", "")
    """Metric and label of held-out evaluations, drawn as markers joined by dashes."""


def _panels(rows: MetricRows, curves: Curves, temperature: float) -> list[_Panel]:
    """Return the panels for one run."""
    logged = {name.removeprefix("reward/") for row in rows for name in row if name.startswith("reward/")}
    components = {name: label for name, label in curves.rewards.items() if name in logged}
    components |= {name: name for name in sorted(logged - {"total", *components})}
    held_out_label = f"held out, {decoding(temperature)}"
    panels = [
        _Panel(
            "reward", {"reward/total": "total"} | {f"reward/{n}": label for n, label in components.items()}
        ),
        *(
            _Panel(label, {f"train/{name}": "training, sampled"}, (f"eval/{name}", held_out_label))
            for name, label in curves.metrics.items()
        ),
        _Panel("valid searches per question", {"train/searches": "training"}, ("eval/searches", "held out")),
        _Panel("entropy (nats per token)", {"train/entropy": "policy"}),
        _Panel("KL to the reference (nats per token)", {"train/kl": "policy"}),
    ]
    if any("critic/explained_variance" in row for row in rows):
        panels.append(_Panel("explained variance of the critic", {"critic/explained_variance": "critic"}))
    return panels


def plot_training(
    rows: MetricsSource,
    out_png: str | pathlib.Path,
    title: str = "",
    temperature: float = 0.0,
    curves: Curves | None = None,
) -> None:
    """Plot one run over its steps: reward with components, metrics of the recipe, searches, entropy, KL, explained variance.

    Args:
      rows: the metrics.
      out_png: file to write.
      title: title of the figure.
      temperature: temperature of the held-out evaluations, which are drawn as markers.
      curves: rewards and metrics that the recipe declares (`Recipe.curves`).

    A panel without values shows "not logged". Raises UserError for a run without steps.
    """
    metric_rows = _rows(rows)
    panels = _panels(metric_rows, curves or Curves(), temperature)
    columns = 4 if len(panels) > 6 else 3
    figure, axes = new_figure(-(-len(panels) // columns), columns, title)
    window = 0
    for axis, panel in zip(axes, panels):
        style_axis(axis, panel.title)
        for colour, (metric, label) in zip(itertools.cycle(COLOURS), panel.lines.items()):
            steps, values = series(metric_rows, metric)
            window = max(window, _line(axis, steps, values, label, colour))
        metric, label = panel.held_out
        steps, values = series(metric_rows, metric)
        if len(steps):
            axis.plot(steps, values, "D--", color=COLOURS[1], label=label, markersize=6, linewidth=1)
            for index in {0, len(steps) - 1}:
                axis.annotate(
                    f"{values[index]:.3g}",
                    (steps[index], values[index]),
                    textcoords="offset points",
                    xytext=(0, 7),
                    ha="center",
                    fontsize=8,
                    color=INK,
                )
        _add_legend_or_note(axis, legend=len(axis.get_legend_handles_labels()[1]) > 1)
    for axis in axes[len(panels) :]:
        axis.remove()
    if window:
        add_caption(figure, f"Bold lines: mean over {window} steps, centred. Pale lines: each step.")
    save_figure(figure, out_png)


ARMS_IN_PANEL_LEGEND = 4
"""With more arms than this, the legend is below all panels, where it covers no curve."""


def plot_spread(
    runs: Mapping[str, Sequence[MetricsSource]],
    out_png: str | pathlib.Path,
    metrics: Mapping[str, str] | None = None,
    x: str = "step",
    title: str = "",
) -> None:
    """Plot the mean over seeds of several arms, with a band from the lowest seed to the highest.

    Args:
      runs: the name of each arm, and the runs of its seeds.
      out_png: file to write.
      metrics: metrics to plot, and the titles of their panels; None: the main ones.
      x: "step", or a metric such as minutes, to compare arms whose steps have different costs.
      title: title of the figure.

    The n-th points of all seeds are averaged, up to the length of the shortest run. Raises UserError for an arm without runs.
    """
    metrics = metrics or {
        "eval/em": "held-out exact match",
        "eval/f1": "held-out F1",
        "reward/total": "reward",
        "train/searches": "valid searches per question",
    }
    columns = min(2, len(metrics))
    figure, axes = new_figure(-(-len(metrics) // columns), columns, title)
    loaded = {}
    for name, sources in runs.items():
        if not sources:
            raise UserError(
                f"runs[{name!r}] is empty: give the metrics.jsonl of one seed or more, or leave the arm out"
            )
        loaded[name] = [_rows(source) for source in sources]
    window = 0
    for axis, (metric, panel) in zip(axes, metrics.items()):
        style_axis(axis, panel, "" if x == "step" else x.split("/")[-1])
        for index, (name, seeds) in enumerate(loaded.items()):
            label = f"{name} ({len(seeds)} seed{'s' if len(seeds) > 1 else ''})"
            window = max(window, band(axis, seeds, metric, x, label, COLOURS[index % len(COLOURS)]))
        _add_legend_or_note(axis, legend=len(loaded) <= ARMS_IN_PANEL_LEGEND)
    lines: Sequence[Any] = next((axis.get_lines() for axis in axes if axis.get_lines()), [])
    caption = band_caption(max(map(len, loaded.values()), default=1), window)
    if len(loaded) > ARMS_IN_PANEL_LEGEND and lines:
        figure.set_figheight(figure.get_figheight() + 0.22 * (-(-len(loaded) // 2) + bool(caption)))
        # Pass the lines themselves, so that constrained layout reserves room for the legend. The caption is the legend's title,
        # because the layout would draw that of `add_caption` over the legend.
        style = {"ncols": 2, "fontsize": 7.5, "frameon": False, "labelcolor": INK, "title_fontsize": 9}
        legend = figure.legend(handles=lines, loc="outside lower center", title=caption, **style)
        legend.get_title().set_color(QUIET)
    else:
        add_caption(figure, caption)
    save_figure(figure, out_png)


def series(rows: MetricRows, metric: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """Return (x, value) of the rows with a finite value of `metric`, as float64 arrays in order of x."""
    pairs = [(row[x], row[metric]) for row in rows if row.get(metric) is not None and row.get(x) is not None]
    points = np.array(pairs, np.float64).reshape(-1, 2)
    points = points[np.isfinite(points).all(axis=1)]
    points = points[np.argsort(points[:, 0], kind="stable")]
    return points[:, 0], points[:, 1]


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Return the mean over a centred window, which is narrower at both ends."""
    if width < 2:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - width // 2, 0), np.minimum(index + width // 2 + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def _line(axis: Any, steps: np.ndarray, values: np.ndarray, label: str, colour: str) -> int:
    """Draw a curve. If it has many steps, draw its mean over a window, and behind it a pale line with the value of each step.

    Returns the width of that window in steps, or 0 if the curve is not smoothed.
    """
    if not len(steps):
        return 0
    width = len(values) // 12
    if width >= 2:
        axis.plot(steps, values, color=colour, alpha=0.22, linewidth=0.9)
    marker = "." if len(steps) < 10 else ""
    axis.plot(steps, smooth(values, width), marker=marker, color=colour, label=label, linewidth=1.7)
    return width if width >= 2 else 0


def band(axis: Any, seeds: Sequence[MetricRows], metric: str, x: str, label: str, colour: str) -> int:
    """Draw the mean over seeds of one metric, in a band from the lowest seed to the highest; nothing if a seed lacks the metric.

    Returns the width of the smoothing window in steps, or 0 if the curve is not smoothed.
    """
    curves = [series(rows, metric, x) for rows in seeds]
    length = min(len(values) for _, values in curves)
    if not length:
        return 0
    xs = np.mean([seed_xs[:length] for seed_xs, _ in curves], axis=0)
    # Training curves are smoothed; the few points of evaluations are not.
    width = length // 12 if length > 24 else 0
    values = np.stack([smooth(points[:length], width) for _, points in curves])
    axis.fill_between(xs, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.16, linewidth=0)
    marker = "o" if length <= 24 else ""
    axis.plot(xs, values.mean(axis=0), marker=marker, markersize=4, color=colour, label=label, linewidth=1.8)
    return width if width >= 2 else 0


def band_caption(seeds: int, window: int) -> str:
    """Return a caption that explains the lines and bands that `band` draws. `seeds` is the largest number of seeds of an arm, and
    `window` the width of the smoothing window in steps (0: not smoothed)."""
    steps = f"over {window} steps, centred" if window else ""
    if seeds > 1:
        averaged = " and ".join(filter(None, ("over seeds", steps)))
        return f"Lines: mean {averaged}. Bands: from the lowest seed to the highest."
    return f"Lines: mean {steps}." if steps else ""


def _rows(source: MetricsSource) -> MetricRows:
    if not isinstance(source, str | pathlib.Path):
        rows: MetricRows = source
    elif not pathlib.Path(source).is_file():
        raise UserError(f"no metrics at {source}: give the metrics.jsonl of a run's workdir")
    else:
        rows = read_metrics(source)
    if not rows:
        raise UserError(
            f"{source if isinstance(source, str | pathlib.Path) else 'rows'}: no step has been logged yet"
        )
    return rows


def _add_legend_or_note(axis: Any, legend: bool) -> None:
    if not axis.lines:
        axis.text(0.5, 0.5, "not logged", transform=axis.transAxes, ha="center", color=QUIET, fontsize=9)
    elif legend:
        legend_below(axis)
