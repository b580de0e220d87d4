"""Find tagged spans such as `<tag>...</tag>` in a text, with one rule for malformed ones. Read `tag_contents` first.

A span is an opening tag and the nearest closing tag after it, without another opening tag of
the same name between them:
- `<a>x</a>` is one span, and so is an empty `<a></a>`;
- in `<a>x<a>y</a>` only `y` is in a span: the first opening tag is never closed;
- in `<a>x<a>y</a>z</a>` only `y` is in a span: spans of one tag do not nest, and the last closing tag is stray;
- an opening tag without a closing tag is not a span, nor is a closing tag without an opening tag;
- other tags inside a span are part of its content.
Tags are matched exactly: `<A>`, `<a >` and `<a/>` are text. The same rule holds for tags with other markers, such as
`<|begin_of_query|>` and `<|end_of_query|>` (R1-Searcher).
"""

import re
from collections.abc import Sequence

Tag = str | tuple[str, str]
"""The name of a tag, or the pair of its opening and closing markers: ("<a>", "</a>") for the name "a".

If the closing marker is "", the opening marker is a heading (R3-RAG), such as "The final answer:". A heading opens no span. Here
only `markers`, `in_tags` and `without_tags` accept a heading."""

MARKER = re.compile(r"<[^<>\s]+>")
"""Matches any marker, opening or closing."""

_BETWEEN_MARKERS = re.compile(r"\s*<[^<>\s]+>(.*)<[^<>\s]+>\s*", re.DOTALL)


def markers(tag: Tag) -> tuple[str, str]:
    """Return the opening and the closing marker of a tag."""
    return (f"<{tag}>", f"</{tag}>") if isinstance(tag, str) else tag


def tag_named(name: str) -> Tag:
    """Parse a tag from a command-line argument: a name, or a heading that ends with a colon ("The final answer:")."""
    return (name, "") if name.endswith(":") else name


def in_tags(tag: Tag, content: str) -> str:
    """Return a span with spaces around its content."""
    opening, closing = markers(tag)
    return f"{opening} {content} {closing}"


def tag_contents(text: str, tag: Tag) -> list[str]:
    """Return the contents of the spans of `tag` in order, with their white space. Takes time linear in the length of the text."""
    opening, closing = markers(tag)
    contents = []
    for part in text.split(opening)[1:]:
        content, closed, _ = part.partition(closing)
        if closed:
            contents.append(content)
    return contents


def last_content(texts: Sequence[str], tag: Tag) -> str:
    """Return the stripped content of the last span of `tag` in several separate texts; "" if there is none."""
    contents = [content for text in texts for content in tag_contents(text, tag)]
    return contents[-1].strip() if contents else ""


def without_tags(text: str, tag: Tag) -> str:
    """Return the text without the spans of `tag`, markers and contents. For a heading: the text before its first occurrence.

    Takes time linear in the length of the text.
    """
    opening, closing = markers(tag)
    if not closing:
        return text.partition(opening)[0]
    first, *parts = text.split(opening)
    outside = [first]
    for part in parts:
        _, closed, rest = part.partition(closing)
        outside.append(rest if closed else f"{opening}{part}")
    return "".join(outside)


def count_tags(text: str, tag: Tag) -> tuple[int, int]:
    """Return how often the opening and the closing tag occur, in spans or stray."""
    opening, closing = markers(tag)
    return text.count(opening), text.count(closing)


def has_exactly_one(texts: Sequence[str], tag: Tag) -> bool:
    """Return whether the tag makes exactly one span in several texts and occurs nowhere else in them."""
    counts = [count_tags(text, tag) for text in texts]
    openings, closings = sum(c[0] for c in counts), sum(c[1] for c in counts)
    return openings == closings == 1 and sum(len(tag_contents(text, tag)) for text in texts) == 1


def tag_sequence(text: str, tags: Sequence[Tag]) -> list[Tag] | None:
    """Return the tags of the spans of a text that consists of spans and white space alone; None for any other text.

    No span may contain a marker of `tags`. Takes time linear in the length of the text.
    """
    # By marker: its tag, and whether it is the closing marker.
    meanings = {marker: (tag, closes) for tag in tags for closes, marker in zip((False, True), markers(tag))}
    sequence: list[Tag] = []
    inside: Tag | None = None
    for index, part in enumerate(re.split(f"({'|'.join(map(re.escape, meanings))})", text)):
        if index % 2 == 0:  # text between two markers
            if inside is None and part.strip():
                return None
            continue
        tag, closes = meanings[part]
        if closes != (inside is not None) or (closes and tag != inside):
            return None
        inside = None if closes else tag
        sequence += [] if closes else [tag]
    return sequence if inside is None else None


def enclosed_content(text: str) -> str | None:
    """Return what stands between the two markers of a text that begins and ends with a marker; None for any other text.

    The markers may belong to different tags.
    """
    match = _BETWEEN_MARKERS.fullmatch(text)
    return match[1] if match else None
