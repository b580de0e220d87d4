"""Varies one field of an evaluation: runs one evaluation per value, and writes a table and a plot of
metrics and costs over the values.

The analyses of the papers are in `rrl.studies.analyses`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rrl.errors import UserError
from rrl.eval.comparison import as_csv, comparison_rows
from rrl.eval.comparison_tables import as_markdown
from rrl.eval.evaluation_run import EvaluationRun, load_runs
from rrl.files import atomic_stream, saving
from rrl.report.figures import COLOURS, GRID, legend_below, new_figure, save_figure, style_axis

COST_TITLES = {
    "searches": "searches per question",
    "passages": "distinct passages found",
    "tokens_per_correct": "tokens written per right answer",
    "all_tokens_per_correct": "tokens read and written per right answer",
}
"""Cost -> title of its panel."""
RATE_TITLES = {"recall": "recall of gold passages", "full_recall": "all gold passages found"}
"""Retrieval metric, which is plotted in percent -> title of its panel."""

Evaluate = Callable[[str, str, Path], None]
"""(field name, value, workdir): evaluates with that value of the field and writes into the workdir. Does not repeat
a finished evaluation."""


def values_of(text: str) -> list[str]:
    """Return the values that a flag lists: "1,2,5", "1-10" or "scann,bm25".

    Raises UserError for an empty list and for duplicates.
    """
    values: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        span = re.fullmatch(r"(\d+)-(\d+)", part)
        values += map(str, range(int(span[1]), int(span[2]) + 1)) if span else [part]
    if not values or len(set(values)) < len(values):
        raise UserError(f"values={text!r} must list one value or more, each once, such as 1,2,5 or 1-10")
    return values


def sweep(
    name: str,
    values: Sequence[str],
    evaluate: Evaluate,
    out: str | Path,
    *,
    level: float = 0.95,
    seed: int = 0,
) -> str:
    """Evaluate at each value, write sweep.md, sweep.csv and sweep.png into `out`, and return the Markdown.

    An interrupted sweep continues where it stopped.

    Args:
      name: the field that is varied.
      values: its values.
      evaluate: runs one evaluation.
      out: folder for the results, with one subfolder per value.
      level: level of the confidence intervals, such as 0.95.
      seed: seed of the bootstrap.

    Raises:
      UserError: two values would share a folder.
      SaveError: a result could not be written.
      Exception: whatever `evaluate` raises.
    """
    out = Path(out)
    folders = [out / folder_of(value) for value in values]
    if len(set(folders)) < len(folders):
        raise UserError(
            f"values={list(values)}: two of them would share one folder; spell one of them differently"
        )
    for value, folder in zip(values, folders):
        evaluate(name, value, folder)
    runs = load_runs(folders)
    rows = [
        {name: value} | row for value, row in zip(values, comparison_rows(runs, level, seed), strict=True)
    ]
    text = f"# {name}\n\n{as_markdown(runs, rows)}"
    for file, content in (("sweep.md", text), ("sweep.csv", as_csv(rows))):
        with saving(out / file), atomic_stream(out / file) as stream:
            stream.write(content.encode("utf-8", "replace"))
    with saving(out / "sweep.png"):
        plot_sweep(name, values, runs, rows, out / "sweep.png")
    return text


def folder_of(value: str) -> str:
    """Return a value as the name of a folder."""
    return re.sub(r"[^\w.-]+", "_", value).strip("_.") or "none"


def plot_sweep(
    name: str,
    values: Sequence[str],
    runs: Sequence[EvaluationRun],
    rows: Sequence[Mapping[str, Any]],
    png: Path,
) -> None:
    """Plot answer metrics with their intervals in the first panel, and each retrieval metric and cost in a panel of its own.

    The x-axis has the values. Metrics and costs that a run lacks are not plotted. Values that are not numbers become
    separate points instead of a line.
    """
    metrics = [metric for metric in runs[0].metrics if all(metric in row for row in rows)]
    costs = {
        key: title for key, title in (RATE_TITLES | COST_TITLES).items() if all(key in row for row in rows)
    }
    first = runs[0].card
    figure, axes = new_figure(-(-(1 + len(costs)) // 3), min(3, 1 + len(costs)), f"{first.dataset}: {name}")
    numeric = _numbers(values)
    x_positions = np.arange(len(values)) if numeric is None else numeric
    line = "" if numeric is None else "-"
    for axis, title in zip(axes, ["percent", *costs.values()]):
        style_axis(axis, title, name)
        axis.set_xticks(x_positions, values, rotation=0 if numeric is not None else 20)
    for colour, metric in zip(COLOURS, metrics):
        mean, low, high = (
            100 * np.array([row[key] for row in rows]) for key in (metric, f"{metric}_low", f"{metric}_high")
        )
        axes[0].errorbar(
            x_positions,
            mean,
            (mean - low, high - mean),
            fmt=f"o{line}",
            color=colour,
            label=metric,
            markersize=4,
            capsize=2,
        )
    legend_below(axes[0])
    for axis, key in zip(axes[1:], costs):
        heights = np.array([row[key] for row in rows]) * (100 if key in RATE_TITLES else 1)
        axis.plot(x_positions, heights, f"o{line}", color=COLOURS[0], markersize=4)
        axis.set_ylim(bottom=0)
    for axis in axes[1 + len(costs) :]:
        axis.set_axis_off()
    for axis in axes:
        axis.grid(color=GRID, linewidth=0.7)
    save_figure(figure, png)


def _numbers(values: Sequence[str]) -> np.ndarray | None:
    try:
        return np.array([float(value) for value in values])
    except ValueError:
        return None
