"""Queries asked side by side: each is answered, in the order they were asked, before the row goes on."""

import collections

import numpy as np
import pytest

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import Search
from rrl.retrieval.retriever import Hit
from rrl.rollout.automaton import compile_sets
from rrl.rollout.episodes import Request
from rrl.rollout.exchange import DECODING, PAUSED, DeviceReport, ExchangeSizes
from rrl.rollout.protocol import Finish, SearchFor, SingleTurn
from rrl.rollout.scheduler import Scheduler


class Asks(SingleTurn):
    """One turn, three queries, two of them alike."""

    def react(self, episode, text, stop):
        return SearchFor("a", ("b", "a"))

    def observe(self, episode, *found):
        assert [search.passages for search in episode.searches] == [tuple(some or ()) for some in found]
        return Finish(" ".join("failed" if some is None else some[0].title for some in found))


class Library:
    """Finds a passage named like the query; a query of two letters cannot be searched."""

    def __init__(self, needs_embeddings, broken=()):
        self.needs_embeddings, self.broken, self.asked, self.known = needs_embeddings, broken, [], ""

    def tokenize(self, queries):
        return np.zeros((len(queries), 2), np.int32)

    def recall(self, query, k):
        return [Hit(Passage(query, "known", ""), 1.0)] if query in self.known else None

    def search(self, queries, k, vectors=None):
        self.asked += queries
        if set(queries) & set(self.broken):
            raise ValueError("broken")
        return [[Hit(Passage(query, query.upper(), ""), 1.0)] for query in queries]


def finished(library):
    """The one trajectory of a host that can have one query encoded at a time."""
    limits = ExchangeSizes(rows=2, context=64, wake_threshold=1, prefill_tokens=32, query_tokens=2)
    ended = []
    host = Scheduler(
        collections.deque([[(0, Request(Question("q", "", ()), np.arange(4, dtype=np.int32), 0))]]),
        Asks(turn_tokens=4),
        compile_sets([()], [b"a"] * 8),
        limits,
        encode=lambda text: np.zeros(0, np.int32),
        decode=lambda ids: "",
        encode_prompt=lambda text: np.zeros(0, np.int32),
        vocab_size=8,
        retriever=library,
        on_finish=lambda index, trajectory: ended.append(trajectory),
    )
    ids, none, vectors = np.zeros((2, 4), np.int32), np.zeros((2, 4)), np.zeros((1, 2), np.float32)
    for exchange in range(20):
        status = np.array([PAUSED if exchange else DECODING, DECODING])
        host.exchange(DeviceReport(status, np.full(2, -1), ids, none, none, np.ones(2, int)), vectors)
        assert host.error is None, host.error
        if ended:
            return ended[0]
    raise AssertionError("the row never went on")


@pytest.mark.parametrize("needs_embeddings", [False, True])
def test_queries_side_by_side_are_answered_in_their_order_and_each_searched_once(needs_embeddings):
    library = Library(needs_embeddings)
    found = finished(library)
    assert found.ended == "A B A"
    passages = {query: (Passage(query, query.upper(), ""),) for query in "ab"}
    assert found.searches == [
        Search(0, query, (query.upper(),), passages=passages[query]) for query in ("a", "b", "a")
    ]
    assert sorted(library.asked) == ["a", "b"]


@pytest.mark.parametrize("needs_embeddings", [False, True])
def test_one_that_fails_takes_nothing_from_the_others(needs_embeddings):
    found = finished(Library(needs_embeddings, broken=("b",)))
    assert found.ended == "A failed A"
    assert [search.failed for search in found.searches] == [False, True, False]


def test_what_the_retriever_remembers_is_not_encoded_again():
    library = Library(True)
    library.known = "a"
    found = finished(library)
    assert found.ended == "known B known" and library.asked == ["b"]
