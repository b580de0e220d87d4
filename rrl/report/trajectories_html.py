"""Show trajectories: a self-contained page with filters, and one trajectory for a notebook. Read `write_html` first.

The page loads nothing, uses no framework, and is readable without JavaScript, which only the filters need.
All text of policies and passages is escaped, because it may contain anything.
"""

import html
import importlib.resources
import pathlib
import re
from collections.abc import Mapping, Sequence

from rrl.data.trajectory import Trajectory
from rrl.files import write_atomically
from rrl.report.article import ENDINGS, article, correctness, in_words
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
    """Write a page with all trajectories: a list with filters, and each trajectory in full.

    Args:
      trajectories: the trajectories.
      path: file to write.
      title: title of the page.
      tags: the protocol's tags, and their kinds in `LEGEND`.
      token_bytes: the exact bytes of each token id. With them, each sampled token shows its log-probability.
      sources: where each trajectory came from, such as `article.HELD_OUT`, `TRAINING` or `UNUSED`; None: not known.

    Raises ValueError if `sources` and `trajectories` differ in length.
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
    """Return one trajectory with its style, as HTML for a notebook or another page. Styles of that page do not affect it."""
    inner = article(trajectory, tags=tags, token_bytes=token_bytes)
    return f'<div class="rrl"><style>{_isolated(_resource("page.css"))}</style>{_legend(token_bytes)}{inner}</div>'


STRONG_SELECTOR = ".rrl" * 4
"""A selector that is more specific than the notebooks' rules for tables, lists and headings (JupyterLab's
`.jp-RenderedHTMLCommon tbody tr:nth-child(odd)`). A shadow root would need a script, which notebooks run only in trusted
outputs."""
DARK = (
    '[data-jp-theme-light="false"]',  # JupyterLab and Notebook 7
    ".vscode-dark",
    '[theme="dark"]',  # Colab
)
"""Selectors of pages that set a dark theme, regardless of the system's theme."""
LIGHT = ('[data-jp-theme-light="true"]', ".vscode-light", '[theme="light"]')
"""Selectors of pages that set a light theme."""


def _isolated(css: str) -> str:
    """Return the style for a trajectory inside another page. Its first rule cancels that page's styles inside the trajectory."""
    themes = re.findall(r"\.rrl \{(\s*--paper[^}]*)\}", css)
    assert len(themes) == 2, "light, dark"
    css = re.sub(r"\.rrl\b", STRONG_SELECTOR, css)
    chosen = "".join(
        f"{', '.join(f'{page} {STRONG_SELECTOR}' for page in pages)} {{{theme}}}\n"
        for pages, theme in zip((LIGHT, DARK), themes, strict=True)
    )
    return f"{'.rrl' * 3} * {{ all: revert; }}\n{css}\n{chosen}"


def _filter_data(trajectory: Trajectory, source: str) -> str:
    filter_text = [
        trajectory.question.text,
        *trajectory.question.answers,
        trajectory.answer,
        trajectory.question.id,
    ]
    fields = {
        "source": source,
        "verdict": correctness(trajectory),
        "kind": trajectory.question.kind,
        "ended": trajectory.ended,
        "searches": str(len(trajectory.searches)),
        "words": " ".join(filter_text).lower(),
    }
    return " ".join(f'data-{name}="{html.escape(value)}"' for name, value in fields.items())


def _list_item(index: int, trajectory: Trajectory) -> str:
    verdict = correctness(trajectory)
    symbol = {"right": "✓", "partly": "◐", "wrong": "✗", "unscored": "·"}[verdict]
    count = len(trajectory.searches)
    reward = f"{trajectory.rewards['total']:.2f}" if "total" in trajectory.rewards else ""
    small = " · ".join(
        filter(
            None, [in_words(trajectory.question.kind), f"{count} search{'' if count == 1 else 'es'}", reward]
        )
    )
    question = html.escape(trajectory.question.text)
    return (
        f'<a href="#t{index}" data-at="{index}"><b class="{verdict}">{symbol}</b>'
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
    present = {correctness(item) for item in trajectories}
    verdicts = sorted(present, key=["right", "partly", "wrong", "unscored"].index)
    counts = sorted({str(len(item.searches)) for item in trajectories}, key=int)
    # (data attribute, label of the option that filters nothing, values, labels of values)
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
        f'<select data-field="{field}" aria-label="{field}"><option value="">{no_filter}</option>'
        + "".join(
            f'<option value="{html.escape(v)}">{html.escape(names.get(v, in_words(v)))}</option>'
            for v in values
        )
        + "</select>"
        for field, no_filter, values, names in selects
        if values
    )
    search = '<input type="search" placeholder="words in the question or answer" aria-label="words">'
    return f'<form id="filters">{boxes}{search}<output></output></form>'


def _legend(token_bytes: Sequence[bytes] | None) -> str:
    keys = "".join(f'<span class="key {kind}">{kind}</span>' for kind in LEGEND)
    keys += '<span class="key sampledkey">solid edge and tint: sampled by the policy</span>'
    keys += '<span class="key givenkey">dashed edge: from the environment</span>'
    keys += '<span class="goldkey"><b class="gold">gold passage</b></span>'
    if token_bytes is not None:
        keys += (
            '<span><t class="p6">underlined</t>: an unlikely token; a stronger line means less likely</span>'
        )
    return f'<p class="legend">{keys}</p>'


def _resource(name: str) -> str:
    return importlib.resources.files("rrl.report").joinpath(name).read_text(encoding="utf-8")
