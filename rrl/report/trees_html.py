"""Retrieval trees drawn (R2AG, Figure 1): a self-contained page with one SVG a question, gold hits marked.

From left to right: the question, and for each expansion a circle, the queries that it asked, and the documents that they
found, which all go into the next expansion. Nothing is fetched and no script is needed; all text is escaped.
"""

import dataclasses
import html
import importlib.resources
import pathlib
import textwrap
from collections.abc import Sequence

from rrl.data.trajectory import Search, Trajectory
from rrl.files import write_atomically
from rrl.recipes.r2ag import R2AG, Expansion
from rrl.report.article import verdict
from rrl.text.normalize import title_key

WIDTH, GAP, LINE, PAD = 216, 74, 15, 8
"""Of a box; between boxes, with the circle in it; of a line of text; around it. In pixels."""
LETTERS = 32
"""Of a line in a box."""
GOLD, AGAIN, OTHER = "hit", "again", "miss"
MARKS = {GOLD: "★", AGAIN: "☆", OTHER: "·"}


@dataclasses.dataclass(frozen=True, slots=True)
class Vertex:
    """A query with what it found (Definition 2.1)."""

    query: str
    predicted: bool
    found: tuple[tuple[str, str], ...]
    """(title, one of the marks) of each document."""

    @property
    def lines(self) -> list[tuple[str, str]]:
        """(text, class) of each line in its box."""
        kind = "predicted " if self.predicted else ""
        asked = [(line, "query") for line in _wrapped(f"{kind}“{self.query}”")]
        told = [
            (line, mark)
            for title, mark in self.found
            for line in _wrapped(f"{MARKS[mark]} {title or 'nothing'}")
        ]
        return asked + (told or [("nothing found", OTHER)])

    @property
    def height(self) -> int:
        """In pixels."""
        return LINE * len(self.lines) + 2 * PAD

    @property
    def mark(self) -> str:
        """The best of its documents' marks."""
        marks = [mark for _, mark in self.found]
        return next((mark for mark in (GOLD, AGAIN) if mark in marks), OTHER)


def vertices(expansions: Sequence[Expansion], gold: Sequence[str]) -> list[list[Vertex]]:
    """The vertices of each expansion; a gold document is a hit where it comes first, and "again" afterwards."""
    wanted, seen = {title_key(title) for title in gold}, set[str]()
    levels = []
    for expansion in expansions:
        level = []
        for search in expansion.searches:
            found = []
            for title in search.titles:
                key = title_key(title)
                found.append((title, OTHER if key not in wanted else AGAIN if key in seen else GOLD))
                seen.add(key)
            level.append(Vertex(search.query, _is_predicted(expansion, search), tuple(found)))
        levels.append(level)
    return levels


def draw(question: str, expansions: Sequence[Expansion], gold: Sequence[str]) -> str:
    """The SVG of one tree."""
    levels = vertices(expansions, gold)
    root = _wrapped(question)
    heights = [sum(v.height for v in level) + 12 * max(len(level) - 1, 0) for level in levels]
    height = max([LINE * len(root) + 2 * PAD, *heights, 60]) + 34
    middle = height / 2
    width = WIDTH + sum(GAP + (WIDTH if level else 30) for level in levels) + 8
    parts = [_box(4, middle - (LINE * len(root) + 2 * PAD) / 2, [(line, "root") for line in root], "root")]
    ends = [(4 + WIDTH, middle)]
    x, found = 4 + WIDTH, set[str]()
    for number, (expansion, level) in enumerate(zip(expansions, levels, strict=True)):
        hub = x + GAP / 2 - 4
        parts += [_edge(start, y, hub, middle) for start, y in ends]
        found |= {title_key(title) for vertex in level for title, _ in vertex.found}
        complete = {title_key(title) for title in gold} <= found
        x += GAP
        ends, y = [], middle - heights[number] / 2
        for vertex in level:
            centre = y + vertex.height / 2
            parts.append(_edge(hub, middle, x, centre, "dashed" if vertex.predicted else ""))
            parts.append(_box(x, y, vertex.lines, vertex.mark))
            ends.append((x + WIDTH, centre))
            y += vertex.height + 12
        parts.append(_hub(hub, middle, number + 1, expansion, complete))
        x += WIDTH if level else 30
    label = f"Retrieval tree of the question: {question}"
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
    )


def write_trees(
    trajectories: Sequence[Trajectory], recipe: R2AG, path: str | pathlib.Path, title: str = "Retrieval trees"
) -> None:
    """Writes a page with the trees of these trajectories, which may be read from a file."""
    trees = "\n".join(_tree(trajectory, recipe) for trajectory in trajectories)
    full = [t.metrics["full_recall"] for t in trajectories if "full_recall" in t.metrics]
    head = f"{len(trajectories)} tree{'' if len(trajectories) == 1 else 's'}"
    if full:
        head += f" · all gold documents found in {100 * sum(full) / len(full):.1f} %"
    files = importlib.resources.files("rrl.report")
    style = "".join(files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "trees.css"))
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{html.escape(title)}</title>
<style>{style}</style></head>
<body class="rrl trees"><header class="bar"><h1>{html.escape(title)}</h1><p class="quiet">{head}</p>
<p class="legend"><span class="hit">★ gold document, found first here</span><span class="again">☆ gold, known already</span>
<span class="miss">· other document</span><span>dashed line: predicted query</span><span>circle: expansion</span>
<span>square: stop</span></p></header>
<main>{trees}</main>
</body></html>
"""
    write_atomically(pathlib.Path(path), page.encode("utf-8", "replace").decode())


def _tree(trajectory: Trajectory, recipe: R2AG) -> str:
    question, told = trajectory.question, trajectory.metrics
    expansions = recipe.expansions(trajectory)
    found = {title_key(title) for search in trajectory.searches for title in search.titles}
    missed = [title for title in question.gold if title_key(title) not in found]
    names = {"recall": "recall", "map": "AP", "passages": "documents", "iterations": "expansions"}
    chips = [f"{label} {told[name]:.3g}" for name, label in names.items() if name in told]
    chips.append(f"ended: {trajectory.ended.replace('_', ' ')}")
    facts = [("gold answer", " · ".join(question.answers))]
    if trajectory.answer:
        facts.append(("generator", trajectory.answer))
    if missed:
        facts.append(("missed", " · ".join(missed)))
    kind = question.kind.replace("_", " ")
    return (
        f'<article><h2>{html.escape(question.text)}</h2><p class="chips">'
        + (f'<span class="chip">{html.escape(kind)}</span>' if kind else "")
        + f'<span class="chip {"right" if not missed else "wrong"}">'
        + ("all gold documents found" if not missed else f"{len(missed)} of {len(question.gold)} missed")
        + "</span>"
        + "".join(f'<span class="chip">{html.escape(chip)}</span>' for chip in chips)
        + '</p><div class="scroll">'
        + draw(question.text, expansions, question.gold)
        + '</div><dl class="facts">'
        + "".join(
            f'<div><dt>{name}</dt><dd class="{verdict(trajectory) if name == "generator" else ""}">'
            f"{html.escape(value)}</dd></div>"
            for name, value in facts
        )
        + "</dl></article>"
    )


def _is_predicted(expansion: Expansion, search: Search) -> bool:
    return any(search is other for other in expansion.predicted)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, LETTERS) or [""]


def _box(x: float, y: float, lines: Sequence[tuple[str, str]], kind: str) -> str:
    height = LINE * len(lines) + 2 * PAD
    spans = "".join(
        f'<text class="{style}" x="{x + PAD:.0f}" y="{y + PAD + LINE * (at + 0.78):.0f}">{html.escape(text)}</text>'
        for at, (text, style) in enumerate(lines)
    )
    return f'<g class="box {kind}"><rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{height}" rx="7"/>{spans}</g>'


def _edge(x1: float, y1: float, x2: float, y2: float, kind: str = "") -> str:
    half = (x1 + x2) / 2
    return f'<path class="edge {kind}" d="M{x1:.0f} {y1:.0f}C{half:.0f} {y1:.0f} {half:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"/>'


def _hub(x: float, y: float, number: int, expansion: Expansion, complete: bool) -> str:
    """The circle of an expansion, with its number; a square where it gave the stop signal, in time or too early."""
    stop = expansion.output.stop
    shape = (
        f'<rect x="{x - 11:.0f}" y="{y - 11:.0f}" width="22" height="22" rx="3"/>'
        if stop
        else f'<circle cx="{x:.0f}" cy="{y:.0f}" r="11"/>'
    )
    state = ("right" if complete else "wrong") if stop else "cut" if expansion.truncated else ""
    word = ("stop" if complete else "too early") if stop else "cut" if expansion.truncated else ""
    said = f'<text class="word" x="{x:.0f}" y="{y + 26:.0f}">{word}</text>' if word else ""
    return f'<g class="hub {state}">{shape}<text x="{x:.0f}" y="{y + 4:.0f}">{number}</text>{said}</g>'
