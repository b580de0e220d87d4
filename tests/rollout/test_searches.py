"""Searches run beside the loop; one that fails or hangs costs its own rows a message, and nobody else anything."""

import concurrent.futures
import threading
import time

import pytest

from rrl.rollout.searches import Searches


class Slow:
    """A retriever that answers when it is told to."""

    needs_embeddings = False

    def __init__(self):
        self.go = threading.Event()

    def search(self, queries, k, embeddings=None):
        self.go.wait(10)
        return [[] for _ in queries]


def collect(searches, count):
    found = []
    while len(found) < count:
        found += searches.done(wait=True)
    return found


def test_a_slow_search_is_left_alone_and_taken_when_it_has_ended():
    slow = Slow()
    searches = Searches(slow, 3, 60.0, set())
    searches.submit([4, 7], ["a", "b"], None)
    assert searches.done(wait=False) == [] and searches.keys == {4, 7}
    slow.go.set()
    assert collect(searches, 2) == [(4, "a", []), (7, "b", [])]
    assert not searches.keys and searches.failed == 0 and searches.seconds > 0


def test_once_searches_were_slow_the_next_is_not_waited_for(monkeypatch):
    waits, wait = [], concurrent.futures.wait
    monkeypatch.setattr(concurrent.futures, "wait", lambda *a, **k: (waits.append(a), wait(*a, **k))[1])
    slow = Slow()
    searches = Searches(slow, 3, 60.0, set())
    searches.submit([0], ["a"], None)
    time.sleep(0.2)
    slow.go.set()
    collect(searches, 1)
    slow.go.clear()
    assert waits
    waits.clear()
    searches.submit([0], ["a"], None)
    assert not waits
    slow.go.set()


def test_a_search_that_hangs_is_given_up_told_once_and_counted(caplog):
    slow, told = Slow(), set()
    searches = Searches(slow, 3, 0.1, told)
    searches.submit([1], ["a"], None)
    searches.submit([2], ["b"], None)
    assert sorted(collect(searches, 2)) == [(1, "a", None), (2, "b", None)]
    assert searches.failed == 2 and caplog.text.count("no answer in 0.1 s") == 1
    slow.go.set()


def test_without_a_retriever_every_search_finds_nothing():
    searches = Searches(None, 3, 60.0, set())
    searches.submit([(1, 0)], ["a"], None)
    assert collect(searches, 1) == [((1, 0), "a", [])]


def test_what_is_no_exception_comes_out():
    class Ended:
        needs_embeddings = False

        def search(self, *arguments):
            raise KeyboardInterrupt

    searches = Searches(Ended(), 3, 60.0, set())
    searches.submit([0], ["a"], None)
    with pytest.raises(KeyboardInterrupt):
        collect(searches, 1)
