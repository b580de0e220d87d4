"""Demonstrations of the scripted expert: recorded digests, and one demonstration in full."""

import hashlib

import pytest

from rrl.miniwiki import KINDS, generate
from rrl.miniwiki.experts import demonstrate
from rrl.recipes.catalogue import make_recipe
from tests.recipes.sample_episodes import as_segments


@pytest.fixture(scope="module")
def wiki():
    return generate("train", 0, 200)


def digest(recipe, wiki):
    whole = hashlib.sha256()
    for kind in KINDS:
        for item in wiki.questions(kind, 10, 0):
            shown = demonstrate(recipe, item, lambda query: wiki.passages[len(query) % 7 :][:2])
            whole.update(repr(as_segments(shown)).encode())
    return whole.hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "fields", "recorded"),
    [
        # recorded at commit 5496356
        ("rsearch", {}, "8d2a72429da6ee2b"),
        ("rsearch", {"use_evidence": False}, "9e8e98b6624fb641"),
        ("tiresrag", {"shown_reflections": 0.0}, "ead32ae77468116c"),
        ("tiresrag", {"shown_reflections": 1.0}, "24df2ab7e255045f"),
    ],
)
def test_demonstrations_have_the_recorded_digests(wiki, name, fields, recorded):
    assert digest(make_recipe(name, fields), wiki) == recorded


def test_demonstration_of_search_r1_thinks_searches_and_answers(wiki):
    (item,) = wiki.questions("two_hop", 1, 0)
    first, second = item.plan.hops
    shown = as_segments(demonstrate(make_recipe("search_r1"), item, lambda query: []))
    assert [text for _, text in shown] == [
        f"<think> To find : {item.plan.facts_text} </think>\n<search> {first.query} </search>",
        "\n<information>\n\n</information>\n",
        f"<think> The {first.query} is {first.value}. </think>\n<search> {second.query} </search>",
        "\n<information>\n\n</information>\n",
        f"<think> The {second.query} is {second.value}. </think>\n<answer> {item.question.answers[0]} </answer>",
    ]
