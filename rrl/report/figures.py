"""Figures in the common style of all plots.

matplotlib takes a second to import and is first needed at the end of a run, so the functions that need it import it.
"""

import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import matplotlib.figure

INK, QUIET, GRID = "#2a2927", "#7a766f", "#e4e0d9"
COLOURS = ("#2667c9", "#c26a00", "#7a3fc0", "#1c7f4a", "#c0362c", "#5b6570", "#b0912f", "#c2559b")


def new_figure(rows: int, columns: int, title: str) -> "tuple[matplotlib.figure.Figure, list[Any]]":
    """Return a figure in the common style, and its axes, row by row."""
    import matplotlib.figure

    # Create the Figure without pyplot, which would need a window system and global state.
    figure = matplotlib.figure.Figure(figsize=(4.3 * columns, 3.1 * rows), dpi=120, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=12, color=INK)
    return figure, list(np.ravel(figure.subplots(rows, columns)))


def style_axis(axis: Any, title: str, x: str = "") -> None:
    """Set the title and style of one axis. If `x` is empty, the horizontal axis shows steps."""
    import matplotlib.ticker

    axis.set_title(title, fontsize=10.5, color=INK, loc="left")
    axis.set_xlabel(x or "step", fontsize=9, color=QUIET)
    if not x:
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axis.grid(color=GRID, linewidth=0.7)
    axis.tick_params(labelsize=8, colors=QUIET, length=0)
    axis.margins(y=0.14)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(GRID)


def legend_below(axis: Any) -> None:
    """Put the legend below the axis, where it covers no line."""
    labels = axis.get_legend_handles_labels()[1]
    columns = 2 if len(labels) > 1 and max(map(len, labels)) < 28 else 1
    axis.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        ncols=columns,
        fontsize=7.5,
        frameon=False,
        labelcolor=INK,
        borderaxespad=0.0,
    )


def add_caption(figure: "matplotlib.figure.Figure", text: str) -> None:
    """Write a caption below all panels, unless it is empty."""
    if text:
        figure.supxlabel(text, fontsize=9, color=QUIET)


def save_figure(figure: "matplotlib.figure.Figure", out_png: str | pathlib.Path) -> None:
    """Write the figure, and create its folder if needed."""
    pathlib.Path(out_png).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png)
