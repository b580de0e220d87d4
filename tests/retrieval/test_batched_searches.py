"""Concurrent requests share few searches, and each request gets its own hits."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rrl.retrieval.batched_searches import BatchedSearches
from rrl.retrieval.retriever import SearchFailed


class Gate:
    """A retriever whose searches wait for the event `go`. The hits of a query are the query itself, k times."""

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
def submit():
    """A function that submits a first request, then others during its search; it returns the retriever and all futures."""

    def submit_while_busy(*others, **options):
        gate = Gate()
        batched, pool = BatchedSearches(gate, **options), ThreadPoolExecutor(16)
        futures = [pool.submit(batched.search, ["first"], 1)]
        assert gate.running.wait(60)
        for waiting, (queries, k) in enumerate(others, 1):
            futures.append(pool.submit(batched.search, queries, k))
            while batched._requests.qsize() < waiting:
                pass
        gate.go.set()
        return gate, futures

    return submit_while_busy


def test_requests_during_a_search_form_one_search_per_k(submit):
    gate, futures = submit(*[([f"q{i}", f"r{i}"], 2) for i in range(8)], (["alone"], 3))
    assert [future.result(60) for future in futures] == [
        [["first"]],
        *([[f"q{i}"] * 2, [f"r{i}"] * 2] for i in range(8)),
        [["alone"] * 3],
    ]
    assert len(gate.calls) == 3 and {len(queries) for queries, _ in gate.calls} == {1, 16}


def test_a_failing_request_does_not_fail_others_of_its_batch(submit):
    _, (_, good, bad) = submit((["good"], 1), (["bad"], 1))
    assert good.result(60) == [["good"]]
    with pytest.raises(SearchFailed):
        bad.result(60)


def test_a_search_has_at_most_max_queries_unless_one_request_has_more(submit):
    gate, futures = submit((["a"], 1), (["b"], 1), (["c", "d", "e"], 1), (["f"], 1), max_queries=2)
    assert [row for future in futures for row in future.result(60)] == [[q] for q in ("first", *"abcdef")]
    assert [len(queries) for queries, _ in gate.calls] == [1, 2, 3, 1]


def test_an_empty_request_returns_no_hits():
    gate = Gate()
    gate.go.set()
    assert BatchedSearches(gate).search([], 1) == []


def test_a_retriever_that_returns_too_few_rankings_fails_the_request_and_serves_the_next():
    class Short:
        def search(self, queries, k):
            return [[query] for query in queries if query != "lost"]

    batched = BatchedSearches(Short())
    with pytest.raises(ValueError, match="returned 1 rankings for 2 queries"):
        batched.search(["kept", "lost"], 1)
    assert batched.search(["kept"], 1) == [["kept"]]
