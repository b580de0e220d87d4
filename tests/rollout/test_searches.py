"""Searches run beside the loop; one that fails or hangs costs its own rows a message, and nobody else anything."""

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
    """A retriever that answers when it is told to."""

    needs_embeddings = False

    def __init__(self):
        self.go = threading.Event()

    def search(self, queries, k, embeddings=None):
        self.go.wait(10)
        return [[] for _ in queries]


@pytest.fixture
def clock(monkeypatch):
    """Seconds, in a list, that pass only where a test says so: limits hold on a busy machine too."""
    seconds = [0.0]
    monkeypatch.setattr("rrl.rollout.searches.time", types.SimpleNamespace(perf_counter=lambda: seconds[0]))
    return seconds


def until(condition):
    """Waits for what a thread does."""
    while not condition():
        time.sleep(0.005)


def collect(searches, count):
    found = []
    while len(found) < count:
        found += searches.done(wait=0.05)
    return found


def test_a_slow_search_is_left_alone_and_taken_when_it_has_ended():
    slow = Slow()
    searches = SearchRunner(slow, 3, 60.0)
    searches.submit(["a", "b"], None)
    assert searches.done() == [] and searches.queries == ["a", "b"]
    slow.go.set()
    assert collect(searches, 2) == [("a", []), ("b", [])]
    assert not searches.queries and searches.seconds > 0


def test_once_searches_were_slow_the_next_is_not_waited_for(monkeypatch):
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


def test_a_search_that_hangs_is_given_up_told_once_and_counted(caplog):
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


def test_what_is_no_exception_comes_out():
    class Ended:
        needs_embeddings = False

        def search(self, *arguments):
            raise KeyboardInterrupt

    searches = SearchRunner(Ended(), 3, 60.0)
    searches.submit(["a"], None)
    with pytest.raises(KeyboardInterrupt):
        collect(searches, 1)


class Refuses:
    """Searches for nothing but what is in `fine`."""

    needs_embeddings = True

    def __init__(self, fine, error):
        self.fine, self.error, self.asked = fine, error, []

    def search(self, queries, k, embeddings=None):
        self.asked.append((queries, embeddings.tolist()))
        if set(queries) - set(self.fine):
            raise self.error
        return [[] for _ in queries]


def test_one_that_fails_takes_nothing_from_those_that_were_searched_with_it(caplog):
    retriever = Refuses("ac", ValueError("no b"))
    searches = SearchRunner(retriever, 3, 60.0)
    searches.submit(["a", "b", "c"], np.array([[1.0], [2.0], [3.0]]))
    assert sorted(collect(searches, 3)) == [("a", []), ("b", None), ("c", [])]
    together, *alone = retriever.asked
    assert together == (["a", "b", "c"], [[1.0], [2.0], [3.0]])
    assert sorted(alone) == [(["a"], [[1.0]]), (["b"], [[2.0]]), (["c"], [[3.0]])]  # each with its own vector
    assert "'b'" in caplog.text and "'a'" not in caplog.text


def test_searches_one_by_one_end_when_the_first_try_would_have_ended(clock):
    slow, asked, failed = Slow(), [], threading.Event()

    def search(queries, *arguments):
        asked.append(queries)
        (failed if len(queries) > 1 else slow.go).wait(60)
        raise ValueError

    slow.search = search
    searches = SearchRunner(slow, 3, 1.0)
    searches.submit(["a", "b"], None)
    clock[0] = 0.7
    failed.set()
    until(lambda: searches.done() == [] and len(asked) == 3)
    clock[0] = 0.99
    assert searches.done() == []
    clock[0] = 1.0  # not 1.7, as if each had a second more
    assert sorted(searches.done()) == [("a", None), ("b", None)]
    slow.go.set()


class Hangs(Refuses):
    """Answers nothing at all where it is asked for what is not in `fine` too."""

    def search(self, queries, k, embeddings=None):
        try:
            return super().search(queries, k, embeddings)
        except LookupError:
            time.sleep(20)


def test_one_that_hangs_takes_nothing_from_those_that_were_searched_with_it(caplog, clock):
    retriever = Hangs("ac", LookupError())
    searches = SearchRunner(retriever, 3, 1.0)
    searches.submit(["a", "b", "c"], np.array([[1.0], [2.0], [3.0]]))
    clock[0] = 0.5
    assert sorted(collect(searches, 2)) == [("a", []), ("c", [])]
    assert searches.queries == ["b"]
    clock[0] = 1.0
    assert collect(searches, 1) == [("b", None)]
    assert searches.seconds == 1.5  # all three for one second, "b" alone for another half
    assert "search failed for 'b': TimeoutError('no answer in 1 s')" in caplog.text
    assert sorted(retriever.asked[1:]) == [(["a"], [[1.0]]), (["b"], [[2.0]]), (["c"], [[3.0]])]


@pytest.mark.parametrize(
    ("count", "tries"), [(MAX_RETRY_BATCHES, 1 + MAX_RETRY_BATCHES), (MAX_RETRY_BATCHES + 1, 1)]
)
def test_each_query_of_a_batch_that_hangs_is_tried_alone_unless_it_may_just_have_much_to_do(
    clock, count, tries
):
    queries = [str(number) for number in range(count)]
    hangs = Hangs("", LookupError())
    searches = SearchRunner(hangs, 3, 1.0)
    searches.submit(queries, np.zeros((count, 1)))
    clock[0] = 0.5
    until(lambda: searches.done() == [] and len(hangs.asked) == tries)
    clock[0] = 1.0
    assert sorted(collect(searches, count)) == sorted((query, None) for query in queries)
    assert len(hangs.asked) == tries


def test_a_large_batch_that_fails_is_tried_again_in_a_few_parts_down_to_the_query():
    queries = [str(number) for number in range(100)]
    refuses = Refuses(queries[1:], ValueError())
    searches = SearchRunner(refuses, 3, 60.0)
    searches.submit(queries, np.zeros((100, 1)))
    assert dict(collect(searches, 100)) == {query: None if query == "0" else [] for query in queries}
    assert searches.seconds > 0 and searches._typical > 0
    assert len(refuses.asked) <= 1 + MAX_RETRY_BATCHES + 4  # the part of "0" has four


def test_who_asks_late_what_another_searches_for_gets_a_search_with_time_left(clock):
    slow, desk = Slow(), InFlightSearches()
    one, other = (SearchRunner(slow, 3, 1.0, desk) for _ in range(2))
    one.submit(["a"], None)
    clock[0] = 0.7
    other.submit(["a"], None)
    clock[0] = 1.0
    assert collect(one, 1) == [("a", None)] and other.done() == []
    slow.go.set()
    assert collect(other, 1) == [("a", [])] and not desk.by_query


def test_what_one_host_searches_for_no_other_of_its_desk_does():
    slow, desk = Slow(), InFlightSearches()
    slow.asked = []
    slow.search = lambda queries, *_: [slow.asked.append(queries), slow.go.wait(10)] and [[] for _ in queries]
    one, other = (SearchRunner(slow, 3, 60.0, desk) for _ in range(2))
    one.submit(["a", "b"], None)
    other.submit(["b", "c"], None)
    other.submit(["a"], None)
    assert other.queries == ["b", "c", "a"] and slow.asked == [["a", "b"], ["c"]]
    slow.go.set()
    assert sorted(collect(other, 3)) == [("a", []), ("b", []), ("c", [])]
    assert sorted(collect(one, 2)) == [("a", []), ("b", [])]
    one.submit(["a"], None)
    assert collect(one, 1) == [("a", [])] and slow.asked[2:] == [["a"]] and not desk.by_query


@pytest.mark.parametrize(
    ("hits", "told"),
    [
        ([], "answered 1 queries with 0 lists"),
        ([[], []], "answered 1 queries with 2 lists"),
        ([[Hit(Passage("1", None, "x"), 1.0)]], "title and text must be texts"),
        ([[Hit(Passage("1", "x", None), 1.0)]], "title and text must be texts"),
        (None, "NoneType"),
    ],
)
def test_what_is_no_answer_is_a_failed_search(caplog, hits, told):
    searches = SearchRunner(Slow(), 3, 60.0)
    searches.retriever.search = lambda queries, *_: hits
    searches.submit(["a"], None)
    assert collect(searches, 1) == [("a", None)]
    assert told in caplog.text


def test_what_is_wrong_with_the_settings_is_raised_and_no_failed_search():
    searches = SearchRunner(Refuses("", UserError("k=0")), 0, 60.0)
    searches.submit(["a", "b"], np.zeros((2, 1)))
    with pytest.raises(UserError, match="k=0"):
        collect(searches, 2)


def test_what_is_remembered_comes_at_once_and_without_a_search():
    retriever = make_retriever([Passage("1", "A", "a word"), Passage("2", "B", "another")], "bm25")
    searches = SearchRunner(retriever, 1, 60.0)
    assert not searches.take_cached("word") and searches.done() == []
    first = retriever.search(["word"], 1)[0][0].passage
    assert searches.take_cached("word") and not len(searches)
    assert searches.done(wait=9.0) == [("word", [first])] and searches.done() == []
    assert searches.take_cached(" ") and searches.done() == [(" ", [])]
    assert (retriever.stats.queries, retriever.stats.cache_hits, retriever.stats.searched) == (3, 1, 1)
