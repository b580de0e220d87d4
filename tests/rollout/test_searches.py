"""Searches run beside the loop. A search that fails or hangs affects only the episodes that requested it."""

import concurrent.futures
import threading
import time
import types

import numpy as np
import pytest

from rrl.data.passages import Passage
from rrl.errors import UserError
from rrl.retrieval.index import make_retriever
from rrl.retrieval.retriever import Hit
from rrl.rollout.searches import MAX_RETRY_BATCHES, InFlightSearches, SearchRunner


class Slow:
    """A retriever that answers once `go` is set."""

    needs_embeddings = False

    def __init__(self):
        self.go = threading.Event()

    def search(self, queries, k, embeddings=None):
        self.go.wait(10)
        return [[] for _ in queries]


@pytest.fixture
def clock(monkeypatch):
    """A list with the current time in seconds. Only the test advances it, so that time limits also hold on a busy machine."""
    seconds = [0.0]
    monkeypatch.setattr("rrl.rollout.searches.time", types.SimpleNamespace(perf_counter=lambda: seconds[0]))
    return seconds


def wait_until(condition):
    """Wait for another thread."""
    while not condition():
        time.sleep(0.005)


def collect(searches, count):
    outcomes = []
    while len(outcomes) < count:
        outcomes += searches.poll(wait=0.05)
    return outcomes


def test_a_slow_search_is_collected_once_it_has_ended():
    slow = Slow()
    searches = SearchRunner(slow, 3, 60.0)
    searches.submit(["a", "b"], None)
    assert searches.poll() == [] and searches.queries == ["a", "b"]
    slow.go.set()
    assert collect(searches, 2) == [("a", []), ("b", [])]
    assert not searches.queries and searches.seconds > 0


def test_submit_does_not_wait_after_slow_searches(monkeypatch):
    waits, wait = [], concurrent.futures.wait
    monkeypatch.setattr(concurrent.futures, "wait", lambda *a, **k: (waits.append(a), wait(*a, **k))[1])
    slow = Slow()
    searches = SearchRunner(slow, 3, 60.0)
    searches.submit(["a"], None)
    time.sleep(0.2)
    slow.go.set()
    collect(searches, 1)
    slow.go.clear()
    assert waits
    waits.clear()
    searches.submit(["a"], None)
    assert not waits
    slow.go.set()


def test_a_search_beyond_its_time_limit_fails_and_is_logged_once(caplog):
    slow = Slow()
    searches = SearchRunner(slow, 3, 0.1)
    searches.submit(["a"], None)
    searches.submit(["b"], None)
    assert sorted(collect(searches, 2)) == [("a", None), ("b", None)]
    assert caplog.text.count("no answer in 0.1 s") == 1
    slow.go.set()


def test_without_a_retriever_every_search_finds_nothing():
    searches = SearchRunner(None, 3, 60.0)
    searches.submit(["a"], None)
    assert collect(searches, 1) == [("a", [])]


def test_a_keyboard_interrupt_in_a_search_is_raised():
    class Interrupted:
        needs_embeddings = False

        def search(self, *arguments):
            raise KeyboardInterrupt

    searches = SearchRunner(Interrupted(), 3, 60.0)
    searches.submit(["a"], None)
    with pytest.raises(KeyboardInterrupt):
        collect(searches, 1)


class Refuses:
    """A retriever that raises `error` for a batch with any query outside `allowed`."""

    needs_embeddings = True

    def __init__(self, allowed, error):
        self.allowed, self.error, self.searched = allowed, error, []

    def search(self, queries, k, embeddings=None):
        self.searched.append((queries, embeddings.tolist()))
        if set(queries) - set(self.allowed):
            raise self.error
        return [[] for _ in queries]


def test_a_failing_query_does_not_fail_the_others_of_its_batch(caplog):
    retriever = Refuses("ac", ValueError("no b"))
    searches = SearchRunner(retriever, 3, 60.0)
    searches.submit(["a", "b", "c"], np.array([[1.0], [2.0], [3.0]]))
    assert sorted(collect(searches, 3)) == [("a", []), ("b", None), ("c", [])]
    together, *alone = retriever.searched
    assert together == (["a", "b", "c"], [[1.0], [2.0], [3.0]])
    assert sorted(alone) == [(["a"], [[1.0]]), (["b"], [[2.0]]), (["c"], [[3.0]])]  # each with its own vector
    assert "'b'" in caplog.text and "'a'" not in caplog.text


def test_retries_end_at_the_time_limit_of_the_first_try(clock):
    slow, searched, failed = Slow(), [], threading.Event()

    def search(queries, *arguments):
        searched.append(queries)
        (failed if len(queries) > 1 else slow.go).wait(60)
        raise ValueError

    slow.search = search
    searches = SearchRunner(slow, 3, 1.0)
    searches.submit(["a", "b"], None)
    clock[0] = 0.7
    failed.set()
    wait_until(lambda: searches.poll() == [] and len(searched) == 3)
    clock[0] = 0.99
    assert searches.poll() == []
    clock[0] = 1.0  # not 1.7: a retry has no time limit of its own
    assert sorted(searches.poll()) == [("a", None), ("b", None)]
    slow.go.set()


class Hangs(Refuses):
    """A retriever that hangs for a batch with any query outside `allowed`."""

    def search(self, queries, k, embeddings=None):
        try:
            return super().search(queries, k, embeddings)
        except LookupError:
            time.sleep(20)


def test_a_hanging_query_does_not_fail_the_others_of_its_batch(caplog, clock):
    retriever = Hangs("ac", LookupError())
    searches = SearchRunner(retriever, 3, 1.0)
    searches.submit(["a", "b", "c"], np.array([[1.0], [2.0], [3.0]]))
    clock[0] = 0.5
    assert sorted(collect(searches, 2)) == [("a", []), ("c", [])]
    assert searches.queries == ["b"]
    clock[0] = 1.0
    assert collect(searches, 1) == [("b", None)]
    assert searches.seconds == 1.5  # the batch of three for one second, "b" alone for half a second
    assert "search failed for 'b': TimeoutError('no answer in 1 s')" in caplog.text
    assert sorted(retriever.searched[1:]) == [(["a"], [[1.0]]), (["b"], [[2.0]]), (["c"], [[3.0]])]


@pytest.mark.parametrize(
    ("count", "tries"), [(MAX_RETRY_BATCHES, 1 + MAX_RETRY_BATCHES), (MAX_RETRY_BATCHES + 1, 1)]
)
def test_each_query_of_a_late_batch_is_retried_alone_if_the_batch_is_small(clock, count, tries):
    queries = [str(number) for number in range(count)]
    hangs = Hangs("", LookupError())
    searches = SearchRunner(hangs, 3, 1.0)
    searches.submit(queries, np.zeros((count, 1)))
    clock[0] = 0.5
    wait_until(lambda: searches.poll() == [] and len(hangs.searched) == tries)
    clock[0] = 1.0
    assert sorted(collect(searches, count)) == sorted((query, None) for query in queries)
    assert len(hangs.searched) == tries


def test_a_large_failed_batch_is_retried_in_smaller_batches_down_to_single_queries():
    queries = [str(number) for number in range(100)]
    refuses = Refuses(queries[1:], ValueError())
    searches = SearchRunner(refuses, 3, 60.0)
    searches.submit(queries, np.zeros((100, 1)))
    assert dict(collect(searches, 100)) == {query: None if query == "0" else [] for query in queries}
    assert searches.seconds > 0 and searches._mean_seconds > 0
    assert len(refuses.searched) <= 1 + MAX_RETRY_BATCHES + 4  # the batch of "0" has four queries


def test_a_query_that_is_late_elsewhere_gets_its_own_search(clock):
    slow, in_flight = Slow(), InFlightSearches()
    one, other = (SearchRunner(slow, 3, 1.0, in_flight) for _ in range(2))
    one.submit(["a"], None)
    clock[0] = 0.7
    other.submit(["a"], None)
    clock[0] = 1.0
    assert collect(one, 1) == [("a", None)] and other.poll() == []
    slow.go.set()
    assert collect(other, 1) == [("a", [])] and not in_flight.by_query


def test_runners_share_the_searches_of_equal_queries():
    slow, in_flight = Slow(), InFlightSearches()
    slow.searched = []
    slow.search = lambda queries, *_: (
        [slow.searched.append(queries), slow.go.wait(10)] and [[] for _ in queries]
    )
    one, other = (SearchRunner(slow, 3, 60.0, in_flight) for _ in range(2))
    one.submit(["a", "b"], None)
    other.submit(["b", "c"], None)
    other.submit(["a"], None)
    assert other.queries == ["b", "c", "a"] and slow.searched == [["a", "b"], ["c"]]
    slow.go.set()
    assert sorted(collect(other, 3)) == [("a", []), ("b", []), ("c", [])]
    assert sorted(collect(one, 2)) == [("a", []), ("b", [])]
    one.submit(["a"], None)
    assert collect(one, 1) == [("a", [])] and slow.searched[2:] == [["a"]] and not in_flight.by_query


@pytest.mark.parametrize(
    ("hits", "message"),
    [
        ([], "answered 1 queries with 0 lists"),
        ([[], []], "answered 1 queries with 2 lists"),
        ([[Hit(Passage("1", None, "x"), 1.0)]], "title and text must be strings"),
        ([[Hit(Passage("1", "x", None), 1.0)]], "title and text must be strings"),
        (None, "NoneType"),
    ],
)
def test_an_invalid_answer_of_the_retriever_is_a_failed_search(caplog, hits, message):
    searches = SearchRunner(Slow(), 3, 60.0)
    searches.retriever.search = lambda queries, *_: hits
    searches.submit(["a"], None)
    assert collect(searches, 1) == [("a", None)]
    assert message in caplog.text


def test_a_user_error_of_the_retriever_is_raised():
    searches = SearchRunner(Refuses("", UserError("k=0")), 0, 60.0)
    searches.submit(["a", "b"], np.zeros((2, 1)))
    with pytest.raises(UserError, match="k=0"):
        collect(searches, 2)


def test_a_query_in_the_retrievers_cache_needs_no_search():
    retriever = make_retriever([Passage("1", "A", "a word"), Passage("2", "B", "another")], "bm25")
    searches = SearchRunner(retriever, 1, 60.0)
    assert not searches.take_cached("word") and searches.poll() == []
    first = retriever.search(["word"], 1)[0][0].passage
    assert searches.take_cached("word") and not len(searches)
    assert searches.poll(wait=9.0) == [("word", [first])] and searches.poll() == []
    assert searches.take_cached(" ") and searches.poll() == [(" ", [])]
    assert (retriever.stats.queries, retriever.stats.cache_hits, retriever.stats.searched) == (3, 1, 1)
