"""Show ranked passages as text and as a self-contained HTML page."""

import html
import pathlib
import re
import textwrap
from collections.abc import Sequence

from rrl.files import write_atomically
from rrl.retrieval.bm25 import WORD, analyse
from rrl.retrieval.retriever import Hit

_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem;
  overflow-wrap: anywhere }
h2 { margin: 2.5rem 0 .5rem } ol { padding-left: 2rem } li { margin: 1rem 0 }
small { opacity: .7; font-variant-numeric: tabular-nums } p { margin: .2rem 0; white-space: pre-line }
mark { background: #ffe08a; color: inherit } @media (prefers-color-scheme: dark) { mark { background: #6b5200 } }
"""


def as_text(queries: Sequence[str], hits_by_query: Sequence[Sequence[Hit]], width: int = 100) -> str:
    """Return rank, score, title, id and text of each passage, for a terminal.

    `hits_by_query` has the hits of each query, best first; `width` is that of the terminal, in characters.
    """
    lines = []
    for query, hits in zip(queries, hits_by_query, strict=True):
        lines.append(query if hits else f"{query}\n  nothing found")
        for rank, hit in enumerate(hits, 1):
            lines.append(f"{rank:3d}. {hit.score:8.4f}  {hit.passage.title}  [{hit.passage.id}]")
            lines.append(textwrap.indent(textwrap.fill(hit.passage.text, width - 5), "     "))
        lines.append("")
    # A terminal cannot show the lone surrogates that a corpus may contain, and would execute control characters.
    text = "\n".join(lines).rstrip().encode("utf-8", "replace").decode()
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)


def write_page(
    path: str | pathlib.Path, queries: Sequence[str], hits_by_query: Sequence[Sequence[Hit]], title: str
) -> None:
    """Write a page with the words of each query marked. The page loads nothing, and all text is escaped."""
    sections = "\n".join(_section(query, hits) for query, hits in zip(queries, hits_by_query, strict=True))
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{html.escape(title)}</title><style>{_STYLE}</style></head>
<body><h1>{html.escape(title)}</h1>
{sections}
</body></html>
"""
    write_atomically(pathlib.Path(path), page.encode("utf-8", "replace").decode())


def _section(query: str, hits: Sequence[Hit]) -> str:
    items = "\n".join(
        f"<li><strong>{_marked(hit.passage.title, query)}</strong> <small>{hit.score:.4f} · "
        f"{html.escape(hit.passage.id)}</small><p>{_marked(hit.passage.text, query)}</p></li>"
        for hit in hits
    )
    body = f"<ol>{items}</ol>" if items else "<p>Nothing found.</p>"
    return f"<section><h2>{html.escape(query)}</h2>\n{body}</section>"


def _marked(text: str, query: str) -> str:
    """Return the escaped text with the query's words marked as BM25 matches them: by stem, without stop words."""
    words = set(analyse(query))
    marked, position = "", 0
    for match in WORD.finditer(text):
        word = html.escape(match[0])
        marked += html.escape(text[position : match.start()])
        marked += word if words.isdisjoint(analyse(match[0])) else f"<mark>{word}</mark>"
        position = match.end()
    return marked + html.escape(text[position:])
