"""Tag boxes: the stated rules for malformed and nested ones."""

import re
import time

import pytest

from rrl.text.spans import boxes, count_tags


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<a>x</a>", ["x"]),
        ("<a></a>", [""]),
        ("<a> x\n y </a>", [" x\n y "]),
        ("<a>x</a> and <a>y</a>", ["x", "y"]),
        ("<a>x<a>y</a>", ["y"]),
        ("<a>x<a>y</a>z</a>", ["y"]),
        ("<a>x", []),
        ("x</a>", []),
        ("</a><a>", []),
        ("<a>x</a></a>", ["x"]),
        ("<a>x<b>y</b></a>", ["x<b>y</b>"]),
        ("<b><a>x</b></a>", ["x</b>"]),
        ("<A>x</A><a >y</a><a/>", []),
        ("", []),
    ],
)
def test_boxes_follow_the_rules(text: str, expected: list[str]) -> None:
    assert boxes(text, "a") == expected


@pytest.mark.parametrize("seed", range(50))
def test_boxes_agree_with_a_regular_expression(seed: int) -> None:
    import random

    draw = random.Random(seed)
    text = "".join(draw.choice(["<a>", "</a>", "<b>", "x", " "]) for _ in range(30))
    assert boxes(text, "a") == re.findall(r"<a>((?:(?!</?a>).)*)</a>", text, re.DOTALL)


def test_tags_are_counted_with_strays() -> None:
    assert count_tags("<a><a>x</a> </b>", "a") == (2, 1)
    assert count_tags("", "a") == (0, 0)


def test_hostile_text_takes_linear_time() -> None:
    started = time.perf_counter()
    assert boxes("<a>" * 200_000, "a") == []
    assert boxes("</a>" * 200_000, "a") == []
    assert time.perf_counter() - started < 2
