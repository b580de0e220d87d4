"""Tests of tag boxes: well-formed, malformed and nested ones."""

import re
import time

import pytest

from rrl.text.spans import (
    count_tags,
    enclosed_content,
    has_exactly_one,
    in_tags,
    last_content,
    tag_contents,
    tag_named,
    tag_sequence,
    without_tags,
)

QUERY = ("<|begin_of_query|>", "<|end_of_query|>")


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
    assert tag_contents(text, "a") == expected


@pytest.mark.parametrize("seed", range(50))
def test_boxes_agree_with_a_regular_expression(seed: int) -> None:
    import random

    draw = random.Random(seed)
    text = "".join(draw.choice(["<a>", "</a>", "<b>", "x", " "]) for _ in range(30))
    assert tag_contents(text, "a") == re.findall(r"<a>((?:(?!</?a>).)*)</a>", text, re.DOTALL)


def test_stray_tags_are_counted() -> None:
    assert count_tags("<a><a>x</a> </b>", "a") == (2, 1)
    assert count_tags("", "a") == (0, 0)


@pytest.mark.parametrize("text", ["<a>x</a> <a>y", "<a>x<a>y</a>z</a>", "</a><a>", "<b><a> </b></a>", "n"])
def test_tags_with_two_markers_follow_the_same_rule(text: str) -> None:
    other = text.replace("</a>", QUERY[1]).replace("<a>", QUERY[0])
    assert tag_contents(other, QUERY) == [
        content.replace("</a>", QUERY[1]).replace("<a>", QUERY[0]) for content in tag_contents(text, "a")
    ]
    assert count_tags(other, QUERY) == count_tags(text, "a")
    rest = without_tags(text, "a").replace("</a>", QUERY[1]).replace("<a>", QUERY[0])
    assert without_tags(other, QUERY) == rest
    assert tag_contents("<query>x</query><|begin_of_query|>x</query>", QUERY) == []


def test_without_boxes_cuts_the_text_at_a_heading() -> None:
    assert without_tags("so\nThe answer: x <a>y</a>", ("The answer:", "")) == "so\n"
    assert without_tags("so", ("The answer:", "")) == "so"
    assert tag_named("The answer:") == ("The answer:", "") and tag_named("answer") == "answer"


def test_written_boxes_are_found_again() -> None:
    assert (
        in_tags("a", "x") == "<a> x </a>" and in_tags(QUERY, "x") == "<|begin_of_query|> x <|end_of_query|>"
    )
    assert last_content([in_tags("a", "x") + in_tags("a", "y"), "<a> z"], "a") == "y"
    assert last_content(["<a> x", "y </a>"], "a") == "" == last_content([], "a")


@pytest.mark.parametrize(
    ("texts", "one"),
    [
        (["<a>x</a>"], True),
        (["no", "<a></a>"], True),
        (["<a>x</a>", "<a>y</a>"], False),
        (["<a>x", "y</a>"], False),
        (["</a><a>"], False),
        (["<a>x</a>", "<a>"], False),
        ([], False),
    ],
)
def test_has_exactly_one_box_rejects_stray_tags(texts: list[str], one: bool) -> None:
    assert has_exactly_one(texts, "a") is one


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n", []),
        ("<a>x</a>\n <b></b>", ["a", "b"]),
        ("<b>x</b><|begin_of_query|>y<|end_of_query|>", ["b", QUERY]),
        ("<a>x</a> and <b>y</b>", None),
        ("<a>x</a>.", None),
        ("<a><b>x</b></a>", None),
        ("<a><a>x</a>", None),
        ("<a>x</b>", None),
        ("</a>", None),
        ("<a>x", None),
        ("<a>x<|begin_of_query|></a>", None),
        ("<a>x<c>y</c></a>", ["a"]),  # other tags are text
        ("<c>y</c>", None),
    ],
)
def test_box_sequence_rejects_nested_boxes_and_text_between_them(text: str, expected: list | None) -> None:
    assert tag_sequence(text, ["a", "b", QUERY]) == expected


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("\n<observation>\nx\n</observation>\n", "\nx\n"),
        ("\n<|begin_of_documents|>\nx</a>\n<|end_of_documents|>\n", "\nx</a>\n"),
        ("My action is not correct. I write <answer> and </answer>.", None),
        ("<a>x</a> hm", None),
        ("<a>", None),
        ("", None),
    ],
)
def test_enclosed_content_rejects_messages_that_only_mention_tags(text: str, inner: str | None) -> None:
    assert enclosed_content(text) == inner


def test_adversarial_text_takes_linear_time() -> None:
    started = time.process_time()
    assert tag_contents("<a>" * 200_000, "a") == []
    assert tag_contents("</a>" * 200_000, "a") == []
    assert tag_sequence("<a>" * 200_000, ["a", "b"]) is None
    assert tag_sequence("<a></a>" * 100_000, ["a", "b"]) == ["a"] * 100_000
    assert enclosed_content("<a>" * 200_000 + ".") is None
    assert time.process_time() - started < 2
