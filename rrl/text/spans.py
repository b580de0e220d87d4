"""Tagged spans of a response: the contents of `<tag>...</tag>` boxes, under one rule for malformed ones.

A box is an opening tag and the nearest closing tag after it, with no other opening of the same tag between. So
- `<a>x</a>` is one box, and an empty `<a></a>` is one box too;
- of `<a>x<a>y</a>` only `y` is boxed: the first opening was never closed;
- of `<a>x<a>y</a>z</a>` only `y` is boxed: boxes of one tag do not nest, and the last closing is stray;
- an opening without a closing, or a closing without an opening, makes no box;
- other tags inside a box are part of its content.
Tags are matched exactly: `<A>`, `<a >` and `<a/>` are text.
"""


def boxes(text: str, tag: str) -> list[str]:
    """Contents of the well-formed boxes of `tag`, in order, white space kept. Linear in the length of the text."""
    contents = []
    for piece in text.split(f"<{tag}>")[1:]:
        content, closing, _ = piece.partition(f"</{tag}>")
        if closing:
            contents.append(content)
    return contents


def without_boxes(text: str, tag: str) -> str:
    """What is left of a text when its well-formed boxes of `tag` are taken out, tags and contents. Linear likewise."""
    first, *pieces = text.split(f"<{tag}>")
    kept = [first]
    for piece in pieces:
        _, closing, rest = piece.partition(f"</{tag}>")
        kept.append(rest if closing else f"<{tag}>{piece}")
    return "".join(kept)


def count_tags(text: str, tag: str) -> tuple[int, int]:
    """How often the opening and the closing tag occur, in boxes or stray."""
    return text.count(f"<{tag}>"), text.count(f"</{tag}>")
