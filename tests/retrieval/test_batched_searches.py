"""Many threads ask, few searches are made, and everyone gets their own answer."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rrl.retrieval.batched_searches import BatchedSearches
from rrl.retrieval.retriever import SearchFailed


class Gate:
    """A retriever whose first search waits until it is let go; it finds the query itself, k times."""

    def __init__(self):
        self.go, self.running, self.calls = threading.Event(), threading.Event(), []

    def search(self, queries, k):
        self.calls.append((tuple(queries), k))
        self.running.set()
        assert self.go.wait(60)
        if "bad" in queries:
            raise SearchFailed("bad")
        return [[query] * k for query in queries]


@pytest.fixture
def asked():
    """Asks for a first query, then, while that is searched, for others; returns the retriever and their futures."""

    def ask(*others, **options):
        gate = Gate()
        joined, pool = BatchedSearches(gate, **options), ThreadPoolExecutor(16)
        futures = [pool.submit(joined.search, ["first"], 1)]
        assert gate.running.wait(60)
        for waiting, (queries, k) in enumerate(others, 1):
            futures.append(pool.submit(joined.search, queries, k))
            while joined._asked.qsize() < waiting:
                pass
        gate.go.set()
        return gate, futures

    return ask


def test_what_is_asked_during_a_search_is_one_search_for_each_k(asked):
    gate, futures = asked(*[([f"q{i}", f"r{i}"], 2) for i in range(8)], (["alone"], 3))
    assert [future.result(60) for future in futures] == [
        [["first"]],
        *([[f"q{i}"] * 2, [f"r{i}"] * 2] for i in range(8)),
        [["alone"] * 3],
    ]
    assert len(gate.calls) == 3 and {len(queries) for queries, _ in gate.calls} == {1, 16}


def test_one_bad_request_spoils_no_other(asked):
    _, (_, good, bad) = asked((["good"], 1), (["bad"], 1))
    assert good.result(60) == [["good"]]
    with pytest.raises(SearchFailed):
        bad.result(60)


def test_no_more_than_so_many_queries_go_together_but_for_one_request(asked):
    gate, futures = asked((["a"], 1), (["b"], 1), (["c", "d", "e"], 1), (["f"], 1), most=2)
    assert [row for future in futures for row in future.result(60)] == [[q] for q in ("first", *"abcdef")]
    assert [len(queries) for queries, _ in gate.calls] == [1, 2, 3, 1]


def test_nothing_is_found_for_no_queries():
    gate = Gate()
    gate.go.set()
    assert BatchedSearches(gate).search([], 1) == []
