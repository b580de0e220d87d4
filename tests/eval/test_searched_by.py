"""What a result card says of a retriever."""

import dataclasses

import pytest

from rrl.data.passages import Passage
from rrl.eval.evaluate import _searched_by
from rrl.eval.result_card import differences
from rrl.retrieval.bm25 import Bm25Config
from rrl.retrieval.build import build_index
from rrl.runs.datasets import RetrieverConfig
from tests.eval.test_result_card import CARD
from tests.retrieval.fakes import WordEncoder

PASSAGES = [Passage("p0", "Oslo", "the capital"), Passage("p1", "Lima", "another capital")]


def test_an_index_that_was_opened_is_described_by_its_own_settings(tmp_path):
    build_index(PASSAGES, tmp_path / "a", "bm25", bm25=Bm25Config(k1=1.5, b=0.6, title_weight=2))
    build_index(PASSAGES, tmp_path / "b", "bm25", bm25=Bm25Config())
    opened = [
        _searched_by(RetrieverConfig(index=str(tmp_path / name), k1=0.1).identity()) for name in ("a", "b")
    ]
    assert opened[0] == {"kind": "bm25", "k1": 1.5, "b": 0.6, "title_weight": 2}
    assert opened[0] != opened[1]
    built = _searched_by(RetrieverConfig(kind="bm25", k1=1.5, b=0.6, title_weight=2).identity())
    assert {name: value for name, value in built.items() if value != ""} == opened[0]


def test_words_that_are_not_stemmed_are_named(tmp_path):
    build_index(PASSAGES, tmp_path / "a", "bm25", bm25=Bm25Config(stem=False))
    assert _searched_by(RetrieverConfig(index=str(tmp_path / "a")).identity())["stem"] is False


def test_a_service_is_named_and_nothing_is_said_of_its_settings():
    found = _searched_by(RetrieverConfig(index="http://localhost:1").identity())
    assert found["kind"] == "http" and not {"k1", "b", "title_weight"} & found.keys()


@pytest.mark.parametrize(("titles", "title_weight"), [(True, 3), (False, 0)])
def test_an_index_of_texts_alone_is_another_retriever_and_says_so(tmp_path, titles, title_weight):
    """Whether it was opened or built in a run, whose title weight counts for embeddings only where it is 0."""
    build_index(PASSAGES, tmp_path / "index", "exact", dataclasses.replace(WordEncoder(), titles=titles))
    opened = RetrieverConfig(index=str(tmp_path / "index"), encoder="e5")
    built = RetrieverConfig(kind="exact", encoder="e5", title_weight=title_weight)
    cards = {
        name: dataclasses.replace(CARD, retriever=_searched_by(config.identity()) | {"encoder": "e5"})
        for name, config in (("opened", opened), ("built", built))
    }
    assert not differences(cards)
    assert ("title weight 0" in cards["opened"].setting["retriever"]) is not titles
    other = dataclasses.replace(
        CARD, retriever={"kind": "exact", "encoder": "e5", "title_weight": 3 * (not titles)}
    )
    (line,) = differences(cards | {"other": other})
    assert line.startswith("retriever differs: opened, built: ")
