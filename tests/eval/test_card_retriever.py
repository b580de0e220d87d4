"""The entry of a retriever in a result card."""

import dataclasses

import pytest

from rrl.data.passages import Passage
from rrl.eval.result_card import differences
from rrl.eval.run_identity import _retriever_for_card
from rrl.retrieval.bm25 import Bm25Config
from rrl.retrieval.build import build_index
from rrl.runs.retriever import RetrieverConfig
from tests.eval.test_result_card import CARD
from tests.retrieval.fakes import WordEncoder

PASSAGES = [Passage("p0", "Oslo", "the capital"), Passage("p1", "Lima", "another capital")]


def test_the_card_of_an_opened_index_has_the_settings_of_the_index(tmp_path):
    build_index(PASSAGES, tmp_path / "a", "bm25", bm25=Bm25Config(k1=1.5, b=0.6, title_weight=2))
    build_index(PASSAGES, tmp_path / "b", "bm25", bm25=Bm25Config())
    opened = [
        _retriever_for_card(RetrieverConfig(index=str(tmp_path / name), k1=0.1).identity())
        for name in ("a", "b")
    ]
    assert opened[0] == {"kind": "bm25", "k1": 1.5, "b": 0.6, "title_weight": 2}
    assert opened[0] != opened[1]
    built = _retriever_for_card(RetrieverConfig(kind="bm25", k1=1.5, b=0.6, title_weight=2).identity())
    assert {name: value for name, value in built.items() if value != ""} == opened[0]


def test_the_card_names_an_index_without_stemming(tmp_path):
    build_index(PASSAGES, tmp_path / "a", "bm25", bm25=Bm25Config(stem=False))
    assert _retriever_for_card(RetrieverConfig(index=str(tmp_path / "a")).identity())["stem"] is False


def test_the_card_of_a_service_has_no_index_settings():
    found = _retriever_for_card(RetrieverConfig(index="http://localhost:1").identity())
    assert found["kind"] == "http" and not {"k1", "b", "title_weight"} & found.keys()


@pytest.mark.parametrize(("titles", "title_weight"), [(True, 3), (False, 0)])
def test_an_index_without_titles_is_another_retriever(tmp_path, titles, title_weight):
    """For an opened index and one built in the run. A title weight matters for embeddings only if it is 0."""
    build_index(PASSAGES, tmp_path / "index", "exact", dataclasses.replace(WordEncoder(), titles=titles))
    opened = RetrieverConfig(index=str(tmp_path / "index"), encoder="e5")
    built = RetrieverConfig(kind="exact", encoder="e5", title_weight=title_weight)
    cards = {
        name: dataclasses.replace(CARD, retriever=_retriever_for_card(config.identity()) | {"encoder": "e5"})
        for name, config in (("opened", opened), ("built", built))
    }
    assert not differences(cards)
    assert ("title weight 0" in cards["opened"].setting["retriever"]) is not titles
    other = dataclasses.replace(
        CARD, retriever={"kind": "exact", "encoder": "e5", "title_weight": 3 * (not titles)}
    )
    (line,) = differences(cards | {"other": other})
    assert line.startswith("retriever differs: opened, built: ")
