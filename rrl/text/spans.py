"""Find tagged spans ("boxes") such as `<tag>...</tag>` in a text, with one rule for malformed ones. Read `tag_contents` first.

A box is an opening tag and the nearest closing tag after it, without another opening tag of the same name between them:
- `<a>x</a>` is one box, and so is an empty `<a></a>`;
- in `<a>x<a>y</a>` only `y` is in a box: the first opening tag is never closed;
- in `<a>x<a>y</a>z</a>` only `y` is in a box: boxes of one tag do not nest, and the last closing tag is stray;
- an opening tag without a closing tag is not a box, nor is a closing tag without an opening tag;
- other tags inside a box are part of its content.
Tags are matched exactly: `<A>`, `<a >` and `<a/>` are text. The same rule holds for tags with other markers, such as
`<|begin_of_query|>` and `<|end_of_query|>` (R1-Searcher).
"""

import re
from collections.abc import Sequence

Tag = str | tuple[str, str]
"""The name of a tag, or its opening and closing markers. If the closing marker is "", the opening marker is a heading (R3-RAG),
such as "The final answer:". A heading has no box: the text that belongs to it ends at the next heading."""

MARKER = re.compile(r"<[^<>\s]+>")
"""Matches any marker, opening or closing."""

_ONE_BOX = re.compile(r"\s*<[^<>\s]+>(.*)<[^<>\s]+>\s*", re.DOTALL)


def markers(tag: Tag) -> tuple[str, str]:
    """Return the opening and the closing marker of a tag."""
    return (f"<{tag}>", f"</{tag}>") if isinstance(tag, str) else tag


def tag_named(name: str) -> Tag:
    """Parse a tag from a command-line argument: a name, or a heading that ends with a colon ("The final answer:")."""
    return (name, "") if name.endswith(":") else name


def in_tags(tag: Tag, content: str) -> str:
    """Return a box with spaces around its content."""
    opening, closing = markers(tag)
    return f"{opening} {content} {closing}"


def tag_contents(text: str, tag: Tag) -> list[str]:
    """Return the contents of the boxes of `tag` in order, with their white space. Takes time linear in the length of the text."""
    opening, closing = markers(tag)
    contents = []
    for part in text.split(opening)[1:]:
        content, closed, _ = part.partition(closing)
        if closed:
            contents.append(content)
    return contents


def last_content(texts: Sequence[str], tag: Tag) -> str:
    """Return the stripped content of the last box of `tag` in several separate texts; "" if there is none."""
    contents = [content for text in texts for content in tag_contents(text, tag)]
    return contents[-1].strip() if contents else ""


def without_tags(text: str, tag: Tag) -> str:
    """Return the text with each box of `tag` removed, both its markers and its content. For a heading, return the text before it.

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
    """Return how often the opening and the closing tag occur, in boxes or stray."""
    opening, closing = markers(tag)
    return text.count(opening), text.count(closing)


def has_exactly_one(texts: Sequence[str], tag: Tag) -> bool:
    """Return whether the tag makes exactly one box in several texts and occurs nowhere else in them."""
    counts = [count_tags(text, tag) for text in texts]
    openings, closings = sum(c[0] for c in counts), sum(c[1] for c in counts)
    return openings == closings == 1 and sum(len(tag_contents(text, tag)) for text in texts) == 1


def tag_sequence(text: str, tags: Sequence[Tag]) -> list[Tag] | None:
    """Return the tags of the boxes of a text that consists of boxes and white space alone; None for any other text.

    No box may contain a marker of `tags`. Takes time linear in the length of the text.
    """
    # (tag, whether it closes) by marker.
    meanings = {marker: (tag, bool(at)) for tag in tags for at, marker in enumerate(markers(tag))}
    sequence: list[Tag] = []
    inside: Tag | None = None
    for at, part in enumerate(re.split(f"({'|'.join(map(re.escape, meanings))})", text)):
        if at % 2 == 0:
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
    """Return the content of a text that is enclosed by one pair of any markers; None for any other text."""
    match = _ONE_BOX.fullmatch(text)
    return match[1] if match else None
