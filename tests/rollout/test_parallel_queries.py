"""Parallel queries of one turn: each is answered, in order, before the episode continues."""

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
from rrl.rollout.searches import SearchRunner
from tests.rollout.empty_text import EmptyText


class ThreeQueries(SingleTurn):
    """One turn with three queries, two of them equal."""

    def step(self, episode, text, stop):
        return SearchFor("a", ("b", "a"))

    def observe(self, episode, *outcomes):
        assert [search.passages for search in episode.searches] == [
            tuple(outcome or ()) for outcome in outcomes
        ]
        return Finish(" ".join("failed" if outcome is None else outcome[0].title for outcome in outcomes))


class NamedPassages:
    """A retriever that returns a passage named like the query. A batch with a `broken` query fails."""

    def __init__(self, needs_embeddings, broken=()):
        self.needs_embeddings, self.broken, self.searched, self.cached = needs_embeddings, broken, [], ""

    def tokenize(self, queries):
        return np.zeros((len(queries), 2), np.int32)

    def cached_hits(self, query, k):
        return [Hit(Passage(query, "known", ""), 1.0)] if query in self.cached else None

    def search(self, queries, k, vectors=None):
        self.searched += queries
        if set(queries) & set(self.broken):
            raise ValueError("broken")
        return [[Hit(Passage(query, query.upper(), ""), 1.0)] for query in queries]


def run_episode(retriever):
    """Return the one trajectory of a scheduler that embeds one query per exchange."""
    sizes = ExchangeSizes(slots=2, context=64, wake_threshold=1, prefill_tokens=32, query_tokens=2)
    finished = []
    scheduler = Scheduler(
        collections.deque([[(0, Request(Question("q", "", ()), np.arange(4, dtype=np.int32), 0))]]),
        ThreeQueries(turn_tokens=4),
        compile_sets([()], [b"a"] * 8),
        sizes,
        EmptyText(vocab_size=8),
        SearchRunner(retriever, top_k=3, time_limit=60.0),
    )
    scheduler.on_finish = lambda index, trajectory: finished.append(trajectory)
    ids, logps, vectors = np.zeros((2, 4), np.int32), np.zeros((2, 4)), np.zeros((1, 2), np.float32)
    for exchange in range(20):
        status = np.array([PAUSED if exchange else DECODING, DECODING])
        report = DeviceReport(status, np.full(2, -1), ids, logps, logps, np.ones(2, int))
        scheduler.exchange(report, vectors)
        assert scheduler.error is None, scheduler.error
        if finished:
            return finished[0]
    raise AssertionError("the episode did not continue")


@pytest.mark.parametrize("needs_embeddings", [False, True])
def test_parallel_queries_are_answered_in_order_and_each_searched_once(needs_embeddings):
    retriever = NamedPassages(needs_embeddings)
    trajectory = run_episode(retriever)
    assert trajectory.ended == "A B A"
    assert trajectory.searches == [
        Search.of(0, query, [Passage(query, query.upper(), "")]) for query in ("a", "b", "a")
    ]
    assert sorted(retriever.searched) == ["a", "b"]


@pytest.mark.parametrize("needs_embeddings", [False, True])
def test_a_failing_query_does_not_fail_the_parallel_ones(needs_embeddings):
    trajectory = run_episode(NamedPassages(needs_embeddings, broken=("b",)))
    assert trajectory.ended == "A failed A"
    assert [search.failed for search in trajectory.searches] == [False, True, False]


def test_a_query_in_the_retrievers_cache_is_not_embedded_again():
    retriever = NamedPassages(True)
    retriever.cached = "a"
    trajectory = run_episode(retriever)
    assert trajectory.ended == "known B known" and retriever.searched == ["b"]
