"""Draw retrieval trees (R2AG, Figure 1): a self-contained page with one SVG per question and marks for gold hits.

Each tree shows, from left to right, the question, and for each expansion a circle with its number, its queries, and the documents
that they returned. The next expansion sees all documents found so far. The page loads nothing and needs no script; all text is
escaped. Read `write_trees` first.
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
from rrl.report.article import correctness
from rrl.text.normalize import title_key

BOX_WIDTH, BOX_GAP, LINE_HEIGHT, PADDING = 216, 74, 15, 8
"""In pixels: width of a box, gap between boxes (it contains the circle), height of a line of text, padding in a box."""
_VERTEX_GAP, _EMPTY_WIDTH, _MARGIN = 12, 30, 4
"""In pixels: gap between boxes of one column, width of a column without boxes, margin on the left and on the right."""
_CAPTION_HEIGHT = 34
"""In pixels: space for the captions of circles in a low tree."""
LINE_CHARACTERS = 32
"""Characters in a line of a box."""
GOLD, AGAIN, OTHER = "hit", "again", "miss"
"""CSS classes of documents: gold and found for the first time, gold and found before, not gold."""
MARKS = {GOLD: "★", AGAIN: "☆", OTHER: "·"}
"""CSS class -> symbol before the title of a document."""


@dataclasses.dataclass(frozen=True, slots=True)
class Vertex:
    """A query with the documents that it returned (R2AG, Definition 2.1)."""

    query: str
    predicted: bool
    """Whether the policy wrote it as a predicted query, not as a base query (R2AG)."""
    documents: tuple[tuple[str, str], ...]
    """(title, one of the keys of `MARKS`) of each document."""

    @property
    def lines(self) -> list[tuple[str, str]]:
        """(text, CSS class) of each line in its box."""
        kind = "predicted " if self.predicted else ""
        query = [(line, "query") for line in _wrapped(f"{kind}“{self.query}”")]
        documents = [
            (line, mark)
            for title, mark in self.documents
            for line in _wrapped(f"{MARKS[mark]} {title or 'nothing'}")
        ]
        return query + (documents or [("nothing found", OTHER)])

    @property
    def height(self) -> int:
        """Height of its box, in pixels."""
        return LINE_HEIGHT * len(self.lines) + 2 * PADDING

    @property
    def mark(self) -> str:
        """`GOLD` if any document has this mark, otherwise `AGAIN` if any has it, otherwise `OTHER`."""
        marks = [mark for _, mark in self.documents]
        return next((mark for mark in (GOLD, AGAIN) if mark in marks), OTHER)


def vertices(expansions: Sequence[Expansion], gold: Sequence[str]) -> list[list[Vertex]]:
    """Return the vertices of each expansion. A gold document is marked `GOLD` at its first occurrence and `AGAIN` later."""
    wanted, seen = {title_key(title) for title in gold}, set[str]()
    levels = []
    for expansion in expansions:
        level = []
        for search in expansion.searches:
            documents = []
            for title in search.titles:
                key = title_key(title)
                documents.append((title, OTHER if key not in wanted else AGAIN if key in seen else GOLD))
                seen.add(key)
            level.append(Vertex(search.query, _is_predicted(expansion, search), tuple(documents)))
        levels.append(level)
    return levels


def draw_tree(question: str, expansions: Sequence[Expansion], gold: Sequence[str]) -> str:
    """Return the SVG of one tree."""
    levels = vertices(expansions, gold)
    root = _wrapped(question)
    heights = [sum(v.height for v in level) + _VERTEX_GAP * max(len(level) - 1, 0) for level in levels]
    height = max([LINE_HEIGHT * len(root) + 2 * PADDING, *heights, 60]) + _CAPTION_HEIGHT
    middle = height / 2
    width = (
        BOX_WIDTH + sum(BOX_GAP + (BOX_WIDTH if level else _EMPTY_WIDTH) for level in levels) + 2 * _MARGIN
    )
    parts = [
        _box(
            _MARGIN,
            middle - (LINE_HEIGHT * len(root) + 2 * PADDING) / 2,
            [(line, "root") for line in root],
            "root",
        )
    ]
    right_ends = [(_MARGIN + BOX_WIDTH, middle)]
    x, found = _MARGIN + BOX_WIDTH, set[str]()
    for number, (expansion, level) in enumerate(zip(expansions, levels, strict=True)):
        circle_x = x + BOX_GAP / 2 - 4  # a little nearer to the boxes on its left
        parts += [_edge(start, y, circle_x, middle) for start, y in right_ends]
        found |= {title_key(title) for vertex in level for title, _ in vertex.documents}
        complete = {title_key(title) for title in gold} <= found
        x += BOX_GAP
        right_ends, y = [], middle - heights[number] / 2
        for vertex in level:
            centre = y + vertex.height / 2
            parts.append(_edge(circle_x, middle, x, centre, "dashed" if vertex.predicted else ""))
            parts.append(_box(x, y, vertex.lines, vertex.mark))
            right_ends.append((x + BOX_WIDTH, centre))
            y += vertex.height + _VERTEX_GAP
        parts.append(_expansion_shape(circle_x, middle, number + 1, expansion, complete))
        x += BOX_WIDTH if level else _EMPTY_WIDTH
    label = f"Retrieval tree of the question: {question}"
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
    )


def write_trees(
    trajectories: Sequence[Trajectory], recipe: R2AG, path: str | pathlib.Path, title: str = "Retrieval trees"
) -> None:
    """Write a page with the trees of these trajectories, which need no tokens. `recipe` splits their text into expansions."""
    trees = "\n".join(_tree(trajectory, recipe) for trajectory in trajectories)
    full = [t.metrics["full_recall"] for t in trajectories if "full_recall" in t.metrics]
    head = f"{len(trajectories)} tree{'' if len(trajectories) == 1 else 's'}"
    if full:
        head += f" · all gold documents found in {100 * sum(full) / len(full):.1f} % of them"
    files = importlib.resources.files("rrl.report")
    style = "".join(files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "trees.css"))
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{html.escape(title)}</title>
<style>{style}</style></head>
<body class="rrl trees"><header class="bar"><h1>{html.escape(title)}</h1><p class="quiet">{head}</p>
<p class="legend"><span class="hit">★ gold document, found first here</span>
<span class="again">☆ gold document, found before</span>
<span class="miss">· other document</span><span>dashed line: predicted query</span><span>circle: expansion</span>
<span>square: stop</span></p></header>
<main>{trees}</main>
</body></html>
"""
    write_atomically(pathlib.Path(path), page.encode("utf-8", "replace").decode())


def _tree(trajectory: Trajectory, recipe: R2AG) -> str:
    question, metrics = trajectory.question, trajectory.metrics
    expansions = recipe.parse_expansions(trajectory)
    found = {title_key(title) for search in trajectory.searches for title in search.titles}
    missed = [title for title in question.gold if title_key(title) not in found]
    names = {"recall": "recall", "map": "AP", "passages": "documents", "iterations": "expansions"}
    chips = [f"{label} {metrics[name]:.3g}" for name, label in names.items() if name in metrics]
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
        + draw_tree(question.text, expansions, question.gold)
        + '</div><dl class="facts">'
        + "".join(
            f'<div><dt>{name}</dt><dd class="{correctness(trajectory) if name == "generator" else ""}">'
            f"{html.escape(value)}</dd></div>"
            for name, value in facts
        )
        + "</dl></article>"
    )


def _is_predicted(expansion: Expansion, search: Search) -> bool:
    return any(search is other for other in expansion.predicted)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, LINE_CHARACTERS) or [""]


def _box(x: float, y: float, lines: Sequence[tuple[str, str]], kind: str) -> str:
    height = LINE_HEIGHT * len(lines) + 2 * PADDING
    left, top = x + PADDING, y + PADDING
    spans = "".join(
        f'<text class="{style}" x="{left:.0f}" y="{top + LINE_HEIGHT * (index + 0.78):.0f}">{html.escape(text)}</text>'
        for index, (text, style) in enumerate(lines)
    )
    return f'<g class="box {kind}"><rect x="{x:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{height}" rx="7"/>{spans}</g>'


def _edge(x1: float, y1: float, x2: float, y2: float, kind: str = "") -> str:
    half = (x1 + x2) / 2
    return f'<path class="edge {kind}" d="M{x1:.0f} {y1:.0f}C{half:.0f} {y1:.0f} {half:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"/>'


def _expansion_shape(x: float, y: float, number: int, expansion: Expansion, complete: bool) -> str:
    """Return the circle of an expansion with its number; a square if the policy stopped here.

    A caption says whether it stopped with all gold documents found ("stop") or without ("too early"), or whether its output
    reached the token limit ("cut").
    """
    stop = expansion.output.stop
    shape = (
        f'<rect x="{x - 11:.0f}" y="{y - 11:.0f}" width="22" height="22" rx="3"/>'
        if stop
        else f'<circle cx="{x:.0f}" cy="{y:.0f}" r="11"/>'
    )
    state = ("right" if complete else "wrong") if stop else "cut" if expansion.truncated else ""
    outcome = ("stop" if complete else "too early") if stop else "cut" if expansion.truncated else ""
    caption = f'<text class="word" x="{x:.0f}" y="{y + 26:.0f}">{outcome}</text>' if outcome else ""
    return f'<g class="hub {state}">{shape}<text x="{x:.0f}" y="{y + 4:.0f}">{number}</text>{caption}</g>'
