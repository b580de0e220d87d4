"""Drawn trees have every query and document, mark each gold hit once, and run no scripts."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from rrl.data.questions import Question
from rrl.data.trajectory import POLICY, PROMPT, Search, Trajectory
from rrl.data.trajectory_files import load_trajectories, save_trajectories
from rrl.recipes.r2ag import R2AG
from rrl.report.trees_html import AGAIN, GOLD, OTHER, draw_tree, vertices, write_trees

QUESTION = Question(
    "q",
    "Who is the spouse of <b>the director</b> of Silver Harbour?",
    ("Edda",),
    "two_hop",
    ("Film", "Person"),
)
ASKS = "<think>.</think><base-Q>director & co</base-Q><base-Q>Who?</base-Q><predicted-Q>{}</predicted-Q>"
STOPS = "<think>.</think><base-Q>stop retrieval</base-Q>"
RECIPE = R2AG()


def tree(*turns, ended="stop", question=QUESTION):
    none = np.zeros(0)
    segments, searches = [], []
    for turn, (text, *found) in enumerate(turns):
        segments += [(PROMPT, "?"), (POLICY, text)]
        searches += [Search(turn, f"query {turn}.{at}", titles) for at, titles in enumerate(found)]
    return Trajectory(question, 0, 0, *(none,) * 5, segments, searches, ended)


FULL = tree(
    (ASKS.format("spouse"), ("Film",), ("Noise",), ("FILM",)),
    (ASKS.format("none"), ("Person", "Other"), ()),
    (STOPS,),
)


def marks(trajectory):
    levels = vertices(RECIPE.parse_expansions(trajectory), trajectory.question.gold)
    return [[(v.predicted, v.mark, [mark for _, mark in v.documents]) for v in level] for level in levels]


def test_a_gold_document_is_marked_as_hit_only_at_its_first_occurrence():
    assert marks(FULL) == [
        [(False, GOLD, [GOLD]), (False, OTHER, [OTHER]), (True, AGAIN, [AGAIN])],
        [(False, GOLD, [GOLD, OTHER]), (False, OTHER, [])],
        [],
    ]


def svg(trajectory):
    text = draw_tree(trajectory.question.text, RECIPE.parse_expansions(trajectory), trajectory.question.gold)
    return text, ElementTree.fromstring(text)


def test_the_svg_is_well_formed_and_has_every_query_and_document():
    text, root = svg(FULL)
    words = " ".join(node.text for node in root.iter("text"))
    for expected in (
        "query 0.0",
        "query 1.1",
        "★ Film",
        "· Noise",
        "☆ FILM",
        "★ Person",
        "nothing found",
        "predicted",
    ):
        assert expected in words
    assert len(re.findall(r'class="box ', text)) == 1 + 5
    assert text.count('class="edge dashed"') == 1
    assert root.get("role") == "img" and "Silver Harbour" in root.get("aria-label")


@pytest.mark.parametrize(
    ("turns", "ended", "state", "word"),
    [
        (((ASKS.format("none"), ("Film",), ("Person",)), (STOPS,)), "stop", "right", "stop"),
        (((ASKS.format("none"), ("Film",), ()), (STOPS,)), "stop", "wrong", "too early"),
        (((ASKS.format("none"),),), "length", "cut", "cut"),
    ],
)
def test_the_last_expansion_shows_whether_it_stopped_in_time(turns, ended, state, word):
    text, root = svg(tree(*turns, ended=ended))
    assert f'class="hub {state}"' in text
    assert word in [node.text for node in root.iter("text")]


def test_boxes_are_inside_the_svg_and_do_not_overlap():
    _, root = svg(FULL)
    width, height = float(root.get("width")), float(root.get("height"))
    boxes = [node.find("rect") for node in root.iter("g") if node.get("class").startswith("box")]
    places = [tuple(float(box.get(name)) for name in ("x", "y", "width", "height")) for box in boxes]
    assert all(x >= 0 and x + w <= width and y >= 0 and y + h <= height for x, y, w, h in places)
    for at, (x, y, w, h) in enumerate(places):
        for x2, y2, w2, h2 in places[at + 1 :]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_the_page_is_self_contained_and_escapes_texts(tmp_path):
    missed = tree((ASKS.format("none"), ("<script>alert(1)</script>",), ()), ended="turn_limit")
    save_trajectories(tmp_path / "t.jsonl", [FULL, missed])
    write_trees(load_trajectories(tmp_path / "t.jsonl"), RECIPE, tmp_path / "trees.html", "A & B")
    page = (tmp_path / "trees.html").read_text()
    assert page.count("<svg") == 2 and "<script" not in page and "A &amp; B" in page
    assert "&lt;b&gt;the" in page and "all gold documents found" in page and "2 of 2 missed" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "★ Film" in page  # marked, although a file has only titles
