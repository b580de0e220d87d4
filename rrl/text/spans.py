"""Tagged spans of a response: the contents of `<tag>...</tag>` boxes, under one rule for malformed ones.

A box is an opening tag and the nearest closing tag after it, with no other opening of the same tag between. So
- `<a>x</a>` is one box, and an empty `<a></a>` is one box too;
- of `<a>x<a>y</a>` only `y` is boxed: the first opening was never closed;
- of `<a>x<a>y</a>z</a>` only `y` is boxed: boxes of one tag do not nest, and the last closing is stray;
- an opening without a closing, or a closing without an opening, makes no box;
- other tags inside a box are part of its content.
Tags are matched exactly: `<A>`, `<a >` and `<a/>` are text. A tag is given by its name, or by its two markers where these are
others, such as `<|begin_of_query|>` and `<|end_of_query|>` (R1-Searcher): the rule is the same.
"""

import re
from collections.abc import Sequence

Tag = str | tuple[str, str]
"""The name of a tag, or its opening and its closing marker. Without a closing ("") the opening is a heading (R3-RAG), which
readers of trajectories take to hold what follows it, up to the next; it makes no box."""

MARKER = re.compile(r"<[^<>\s]+>")
"""What a marker looks like."""

_ONE_BOX = re.compile(r"\s*<[^<>\s]+>(.*)<[^<>\s]+>\s*", re.DOTALL)


def markers(tag: Tag) -> tuple[str, str]:
    """The opening and the closing marker of a tag."""
    return (f"<{tag}>", f"</{tag}>") if isinstance(tag, str) else tag


def tag_named(word: str) -> Tag:
    """The tag of a name, or of a heading with its colon ("The final answer:"), as a command's argument gives it."""
    return (word, "") if word.endswith(":") else word


def boxed(tag: Tag, content: str) -> str:
    """A box with spaces around its content."""
    opening, closing = markers(tag)
    return f"{opening} {content} {closing}"


def boxes(text: str, tag: Tag) -> list[str]:
    """Contents of the well-formed boxes of `tag`, in order, white space kept. Linear in the length of the text."""
    opening, closing = markers(tag)
    contents = []
    for piece in text.split(opening)[1:]:
        content, closed, _ = piece.partition(closing)
        if closed:
            contents.append(content)
    return contents


def last_box(texts: Sequence[str], tag: Tag) -> str:
    """Content of the last box of `tag` in several texts, none of which reaches into the next, stripped; "" without one."""
    found = [content for text in texts for content in boxes(text, tag)]
    return found[-1].strip() if found else ""


def without_boxes(text: str, tag: Tag) -> str:
    """What is left of a text when its well-formed boxes of `tag` are taken out, tags and contents; of a heading, what stands
    before it. Linear likewise."""
    opening, closing = markers(tag)
    if not closing:
        return text.partition(opening)[0]
    first, *pieces = text.split(opening)
    kept = [first]
    for piece in pieces:
        _, closed, rest = piece.partition(closing)
        kept.append(rest if closed else f"{opening}{piece}")
    return "".join(kept)


def count_tags(text: str, tag: Tag) -> tuple[int, int]:
    """How often the opening and the closing tag occur, in boxes or stray."""
    opening, closing = markers(tag)
    return text.count(opening), text.count(closing)


def has_exactly_one_box(texts: Sequence[str], tag: Tag) -> bool:
    """True when the tag makes exactly one box in several texts and stands nowhere else in them."""
    counts = [count_tags(text, tag) for text in texts]
    opened, closed = sum(c[0] for c in counts), sum(c[1] for c in counts)
    return opened == closed == 1 and sum(len(boxes(text, tag)) for text in texts) == 1


def box_sequence(text: str, tags: Sequence[Tag]) -> list[Tag] | None:
    """The tags of a text that is nothing but boxes one after the other, with white space between them; None for any other.

    No box holds a marker of `tags`, and none stands outside. Linear in the length of the text.
    """
    known = {marker: (tag, closes) for tag in tags for closes, marker in enumerate(markers(tag))}
    row: list[Tag] = []
    inside: Tag | None = None
    for at, part in enumerate(re.split(f"({'|'.join(map(re.escape, known))})", text)):
        if at % 2 == 0:
            if inside is None and part.strip():
                return None
            continue
        tag, closes = known[part]
        if closes != (inside is not None) or (closes and tag != inside):
            return None
        inside = None if closes else tag
        row += [] if closes else [tag]
    return row if inside is None else None


def enclosed_content(text: str) -> str | None:
    """Content of a text that one pair of markers encloses, whatever they are; None for any other text."""
    found = _ONE_BOX.fullmatch(text)
    return found[1] if found else None
