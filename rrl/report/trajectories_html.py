"""Trajectories one can read: a self-contained page with a filter, and one trajectory for a notebook.

Nothing is fetched, no framework is used, and the page can be read without JavaScript (only its filter needs it).
All text of policies and passages is escaped: it may hold anything.
"""

import html
import importlib.resources
import pathlib
import re
from collections.abc import Mapping, Sequence

from rrl.data.trajectory import Trajectory
from rrl.files import write_atomically
from rrl.report.article import ENDINGS, article, verdict, words
from rrl.report.segments import RSEARCH_TAGS
from rrl.text.spans import Tag

LEGEND = ("reasoning", "search", "observation", "evidence", "answer")


def write_html(
    trajectories: Sequence[Trajectory],
    path: str | pathlib.Path,
    title: str = "Trajectories",
    *,
    tags: Mapping[Tag, str] = RSEARCH_TAGS,
    token_bytes: Sequence[bytes] | None = None,
    sources: Sequence[str] | None = None,
) -> None:
    """Writes a page with all trajectories: a list with filters, and each one in full.

    `tags` maps the protocol's tags to the kinds in `LEGEND`. With `token_bytes` (the exact bytes of each token id),
    each sampled token shows its log-probability. `sources` says where each trajectory came from, such as
    `article.HELD_OUT`, `TRAINING` or `UNUSED`; ValueError for more or fewer of them than trajectories.
    """
    sources = [""] * len(trajectories) if sources is None else sources
    items = [_list_item(index, item) for index, item in enumerate(trajectories)]
    body = "\n".join(
        f'<div class="slot" id="t{index}" {_filter_data(item, source)}>'
        f"{article(item, source=source, tags=tags, token_bytes=token_bytes)}</div>"
        for index, (item, source) in enumerate(zip(trajectories, sources, strict=True))
    )
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'">
<title>{html.escape(title)}</title>
<style>{_resource("page.css")}</style></head>
<body class="rrl page">
<header class="bar"><h1>{html.escape(title)}</h1>
{_totals(trajectories)}{_filters(trajectories, sources)}{_legend(token_bytes)}</header>
<nav id="list" aria-label="trajectories">{"".join(items)}</nav>
<main>{body}<p id="none" hidden>No trajectory matches this filter.</p></main>
<script>{_resource("page.js")}</script>
</body></html>
"""
    write_atomically(pathlib.Path(path), page)


def fragment(
    trajectory: Trajectory,
    *,
    tags: Mapping[Tag, str] = RSEARCH_TAGS,
    token_bytes: Sequence[bytes] | None = None,
) -> str:
    """One trajectory with its style, as HTML to put inside another page or a notebook, whose own styles do not reach it."""
    inner = article(trajectory, tags=tags, token_bytes=token_bytes)
    return f'<div class="rrl"><style>{_isolated(_resource("page.css"))}</style>{_legend(token_bytes)}{inner}</div>'


INSIDE = ".rrl" * 4
"""More specific than what notebooks have for tables, lists and headings (JupyterLab's `.jp-RenderedHTMLCommon tbody
tr:nth-child(odd)`). A shadow root would need a script, which notebooks run in outputs that they trust only."""
DARK = (
    '[data-jp-theme-light="false"]',  # JupyterLab and Notebook 7
    ".vscode-dark",
    '[theme="dark"]',  # Colab
)
"""Pages with a dark theme of their own, whatever the system has."""
LIGHT = ('[data-jp-theme-light="true"]', ".vscode-light", '[theme="light"]')


def _isolated(css: str) -> str:
    """The style of a page for one trajectory inside another: all that the other page sets is taken back first."""
    themes = re.findall(r"\.rrl \{(\s*--paper[^}]*)\}", css)
    assert len(themes) == 2, "light, dark"
    css = re.sub(r"\.rrl\b", INSIDE, css)
    chosen = "".join(
        f"{', '.join(f'{page} {INSIDE}' for page in pages)} {{{theme}}}\n"
        for pages, theme in zip((LIGHT, DARK), themes, strict=True)
    )
    return f"{'.rrl' * 3} * {{ all: revert; }}\n{css}\n{chosen}"


def _filter_data(trajectory: Trajectory, source: str) -> str:
    searched = [
        trajectory.question.text,
        *trajectory.question.answers,
        trajectory.answer,
        trajectory.question.id,
    ]
    fields = {
        "source": source,
        "verdict": verdict(trajectory),
        "kind": trajectory.question.kind,
        "ended": trajectory.ended,
        "searches": str(len(trajectory.searches)),
        "words": " ".join(searched).lower(),
    }
    return " ".join(f'data-{name}="{html.escape(value)}"' for name, value in fields.items())


def _list_item(index: int, trajectory: Trajectory) -> str:
    state = verdict(trajectory)
    mark = {"right": "✓", "partly": "◐", "wrong": "✗", "unscored": "·"}[state]
    count = len(trajectory.searches)
    reward = f"{trajectory.rewards['total']:.2f}" if "total" in trajectory.rewards else ""
    small = " · ".join(
        filter(None, [words(trajectory.question.kind), f"{count} search{'' if count == 1 else 'es'}", reward])
    )
    question = html.escape(trajectory.question.text)
    return (
        f'<a href="#t{index}" data-at="{index}"><b class="{state}">{mark}</b>'
        f'<span><span class="asked">{question}</span><small>{small}</small></span></a>'
    )


def _totals(trajectories: Sequence[Trajectory]) -> str:
    scored = [item for item in trajectories if "em" in item.metrics]
    count = len(trajectories)
    parts = [f"{count} trajector{'y' if count == 1 else 'ies'}"]
    if scored:
        parts.append(f"{100 * sum(item.metrics['em'] for item in scored) / len(scored):.1f} % exact match")
    if trajectories:
        parts.append(f"{sum(len(item.searches) for item in trajectories) / count:.1f} searches each")
    return f'<p class="quiet">{" · ".join(parts)}</p>'


def _filters(trajectories: Sequence[Trajectory], sources: Sequence[str]) -> str:
    kinds = sorted({item.question.kind for item in trajectories} - {""})
    endings = sorted({item.ended for item in trajectories})
    states = {verdict(item) for item in trajectories}
    verdicts = sorted(states, key=["right", "partly", "wrong", "unscored"].index)
    counts = sorted({str(len(item.searches)) for item in trajectories}, key=int)
    selects: list[tuple[str, str, list[str], dict[str, str]]] = [
        ("source", "every source", sorted(set(sources) - {""}), {}),
        ("verdict", "right or wrong", verdicts, {"partly": "partly right"}),
        ("kind", "every kind", kinds, {}),
        ("ended", "every ending", endings, ENDINGS),
        (
            "searches",
            "any number of searches",
            counts,
            {name: f"{name} searches" for name in counts} | {"1": "1 search"},
        ),
    ]
    boxes = "".join(
        f'<select data-field="{field}" aria-label="{field}"><option value="">{every}</option>'
        + "".join(
            f'<option value="{html.escape(v)}">{html.escape(names.get(v, words(v)))}</option>' for v in values
        )
        + "</select>"
        for field, every, values, names in selects
        if values
    )
    search = '<input type="search" placeholder="words in the question or answer" aria-label="words">'
    return f'<form id="filters">{boxes}{search}<output></output></form>'


def _legend(token_bytes: Sequence[bytes] | None) -> str:
    keys = "".join(f'<span class="key {kind}">{kind}</span>' for kind in LEGEND)
    keys += '<span class="key sampledkey">solid edge and tint: sampled</span>'
    keys += '<span class="key givenkey">dashed edge: given</span>'
    keys += '<span class="goldkey"><b class="gold">gold passage</b></span>'
    if token_bytes is not None:
        keys += '<span><t class="p6">underlined</t>: the stronger, the less likely the token</span>'
    return f'<p class="legend">{keys}</p>'


def _resource(name: str) -> str:
    return importlib.resources.files("rrl.report").joinpath(name).read_text(encoding="utf-8")
