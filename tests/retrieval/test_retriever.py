"""The `Retriever` behaves the same over every kind of index."""

import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rrl.data.passages import Passage
from rrl.errors import UserError
from rrl.retrieval.build import build_index
from rrl.retrieval.folder import KINDS
from rrl.retrieval.index import make_retriever, open_index
from rrl.retrieval.retriever import MAX_QUERY_CHARACTERS, Retriever, RetryPolicy, SearchFailed
from tests.retrieval.fakes import WordEncoder

CORPUS = [
    Passage("p0", "Oslo", "capital of the north"),
    Passage("p1", "Bergen", "town of rain"),
    Passage("p2", "Rome", "capital of the south"),
    Passage("p3", "Bergen", "town of rain"),
]


def opened(kind: str) -> Retriever:
    return make_retriever(CORPUS, kind, None if kind == "bm25" else WordEncoder())  # type: ignore[arg-type]


def ids(retriever: Retriever, queries: list[str], k: int) -> list[list[str]]:
    embeddings = retriever.embed(queries) if retriever.needs_embeddings else None
    return [[hit.passage.id for hit in hits] for hits in retriever.search(queries, k, embeddings)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_passage_is_first_and_ties_are_ordered_by_position(kind: str) -> None:
    assert ids(opened(kind), ["Rome capital of the south", "Bergen town of rain"], 2)[1] == ["p1", "p3"]
    assert ids(opened(kind), ["Rome capital of the south"], 1) == [["p2"]]


@pytest.mark.parametrize("kind", KINDS)
def test_k_beyond_the_corpus_returns_the_whole_corpus(kind: str) -> None:
    for k in (9, 10**12):
        (found,) = ids(opened(kind), ["Bergen capital"], k)
        assert sorted(found) == ["p0", "p1", "p2", "p3"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_query_has_no_hits_and_does_not_affect_others(kind: str) -> None:
    retriever = opened(kind)
    found = ids(retriever, ["", "Oslo", " \n"], 1)
    assert found == [[], ["p0"], []]
    assert retriever.stats.empty == 2
    assert ids(retriever, [], 1) == []


@pytest.mark.parametrize("rows", [(1, 1), (3, 3), (2, 1)])
def test_a_ranking_with_a_wrong_number_of_rows_is_a_failed_search(rows: tuple[int, int]) -> None:
    class Wrong:
        kind, needs_embeddings = "wrong", False

        def search(self, queries: list[str], k: int, embeddings: None) -> tuple[np.ndarray, np.ndarray]:
            return np.zeros((rows[0], k), np.int64), np.zeros((rows[1], k), np.float32)

    with pytest.raises(SearchFailed, match=f"{rows[0]} rankings with {rows[1]} rows of scores for 2 queries"):
        Retriever(CORPUS, Wrong()).search(["a", "b"], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_and_cached_queries_are_searched_once(kind: str) -> None:
    retriever = opened(kind)
    first = ids(retriever, ["Oslo", "Rome", "Oslo", " Oslo "], 2)
    assert first[0] == first[2] == first[3]
    assert (retriever.stats.queries, retriever.stats.searched, retriever.stats.cache_hits) == (4, 2, 0)
    assert ids(retriever, ["Rome", "Bergen"], 2)[0] == first[1]
    assert (retriever.stats.searched, retriever.stats.cache_hits) == (3, 1)
    ids(retriever, ["Rome"], 1)
    assert retriever.stats.searched == 4, "another k is another search"


def test_the_cache_drops_the_least_recently_used_query() -> None:
    retriever = Retriever(CORPUS, opened("bm25")._index, cache_size=2)
    for query in ["Oslo", "Rome", "Oslo", "Bergen", "Oslo", "Rome"]:
        retriever.search([query], 1)
    assert retriever.stats.searched == 4, "Oslo stayed, Rome was dropped for Bergen"


@pytest.mark.parametrize("kind", KINDS)
def test_a_very_long_query_is_cut(kind: str) -> None:
    retriever = opened(kind)
    assert ids(retriever, ["Oslo " + "x" * 10_000_000], 1) == [["p0"]]
    assert all(len(text) <= MAX_QUERY_CHARACTERS for text, _ in retriever._cache)


@pytest.mark.parametrize("kind", KINDS)
def test_many_threads_get_the_hits_of_one(kind: str) -> None:
    words = ["Oslo", "Bergen", "Rome", "capital", "town", "south", "rain", "north"]
    rng = np.random.default_rng(0)
    jobs = [[" ".join(rng.choice(words, 2)) for _ in range(5)] for _ in range(200)]
    expected = [ids(opened(kind), job, 3) for job in jobs]
    retriever = opened(kind)
    retriever._cache_size = 8
    barrier = threading.Barrier(8)

    def work(part: int) -> list[list[list[str]]]:
        barrier.wait()
        return [ids(retriever, job, 3) for job in jobs[part::8]]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    for part, result in enumerate(results):
        assert result == expected[part::8]
    assert retriever.stats.calls == 200


def test_errors_name_the_wrong_argument() -> None:
    dense = opened("exact")
    with pytest.raises(UserError, match="k: got 0"):
        dense.search(["x"], 0, dense.embed(["x"]))
    with pytest.raises(UserError, match=r"embeddings: got shape \(2, 3\), expected \(1, 32\)"):
        dense.search(["x"], 1, np.zeros((2, 3), np.float32))
    with pytest.raises(UserError, match="no query encoder"):
        opened("bm25").tokenize(["x"])
    with pytest.raises(UserError, match="allowed are scann, bm25, exact"):
        make_retriever(CORPUS, "faiss")
    with pytest.raises(UserError, match="encoder: missing"):
        make_retriever(CORPUS, "scann")
    with pytest.raises(UserError, match="no passages"):
        make_retriever([], "bm25")


@pytest.mark.parametrize("query", ["\ud800", "\x00", "𝕺slo Ωmega", "((((", "<search>x</search>"])
@pytest.mark.parametrize("kind", ["bm25"])
def test_unusual_text_is_searched_without_error(kind: str, query: str) -> None:
    assert isinstance(ids(opened(kind), [query], 1)[0], list)


class Faulty:
    """An index whose first `failures` searches raise an error, or take `seconds`."""

    kind = "faulty"
    needs_embeddings = False

    def __init__(self, failures: int = 0, seconds: float = 0.0):
        self.failures, self.seconds, self.calls = failures, seconds, 0

    def search(self, queries, k, embeddings=None):
        self.calls += 1
        if self.calls <= self.failures:
            time.sleep(self.seconds)
            if not self.seconds:
                raise OSError("broken pipe")
        return np.zeros((len(queries), k), np.int64), np.ones((len(queries), k), np.float32)


@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_a_failing_or_slow_search_is_retried(seconds: float) -> None:
    retry_policy = RetryPolicy(time_out=0.5, retries=2, pause=0.01)
    retriever = Retriever(CORPUS, Faulty(2, seconds), retry_policy=retry_policy)
    assert [hit.passage.id for hit in retriever.search(["x"], 1)[0]] == ["p0"]
    assert (retriever.stats.retries, retriever.stats.failures) == (2, 0)


@pytest.mark.parametrize(("seconds", "reason"), [(0.0, "broken pipe"), (2.0, "no answer within 0.5 s")])
def test_a_search_that_always_fails_raises_and_caches_nothing(seconds: float, reason: str) -> None:
    index = Faulty(2, seconds)
    retriever = Retriever(CORPUS, index, retry_policy=RetryPolicy(time_out=0.5, retries=1, pause=0.01))
    with pytest.raises(SearchFailed, match=f"failed 2 times in the faulty index: .*{reason}"):
        retriever.search(["x", "y"], 1)
    assert (retriever.stats.failures, retriever.stats.searched) == (2, 0)
    assert retriever.search(["x"], 1)[0], "the failure was not cached"


@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_size_does_not_change_hits(kind: str) -> None:
    queries = ["Oslo", "Rome capital", "Bergen rain", "", "north", "Oslo", "south town"]
    whole = opened(kind)
    parts = Retriever(CORPUS, opened(kind)._index, whole.text_encoder, retry_policy=RetryPolicy(batch=2))
    assert parts.search(queries, 3) == whole.search(queries, 3)


@pytest.mark.parametrize("kind", ["exact", "scann"])
def test_only_queries_that_must_be_searched_are_embedded(kind: str) -> None:
    retriever = opened(kind)
    given = retriever.search(["Oslo", "Rome"], 2, retriever.embed(["Oslo", "Rome"]))
    embedded: list[str] = []
    retriever.embed = lambda queries: embedded.extend(queries) or WordEncoder().embed(queries)  # type: ignore
    assert retriever.search(["Oslo", "Rome"], 2) == given
    assert embedded == [], "both are cached"
    retriever.search(["Oslo", "Bergen"], 2)
    assert embedded == ["Bergen"]


def test_the_next_batch_is_embedded_while_one_is_searched() -> None:
    second = threading.Event()

    class Encoder(WordEncoder):
        def embed_queries(self, queries):
            if queries == ["second"]:
                second.set()
            return super().embed_queries(queries)

    class Waiting(Faulty):
        needs_embeddings = True

        def search(self, queries, k, embeddings=None):
            if queries == ["first"] and not second.wait(60):
                raise AssertionError("the second batch was not embedded meanwhile")
            return super().search(queries, k)

    retriever = Retriever(CORPUS, Waiting(), Encoder(), retry_policy=RetryPolicy(batch=1))  # type: ignore[arg-type]
    assert [len(hits) for hits in retriever.search(["first", "second"], 1)] == [1, 1]


def test_stats_report_latency_percentiles(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(
        "rrl.retrieval.retriever.time", types.SimpleNamespace(perf_counter=lambda: seconds[0])
    )

    class Timed(Faulty):
        def search(self, queries, k, embeddings=None):
            seconds[0] += 0.1 if self.calls == 0 else 0.01
            return super().search(queries, k)

    retriever = Retriever(CORPUS, Timed())
    for query in "abcdefghij":
        retriever.search([query], 1)
    stats = retriever.stats
    assert (stats.p50_ms, stats.p99_ms) == pytest.approx((10, 91.9))  # between the two slowest calls
    assert "10 queries in 10 calls, 0 cached" in str(stats)


def test_a_retry_policy_out_of_range_is_rejected() -> None:
    for settings in ({"time_out": 0.0}, {"retries": -1}, {"batch": 0}, {"pause": -1.0}):
        with pytest.raises(UserError, match=f"{next(iter(settings))}="):
            RetryPolicy(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_hits_have_the_ids_of_the_corpus_in_memory_and_from_a_folder(kind: str, tmp_path: Path) -> None:
    encoder = None if kind == "bm25" else WordEncoder()
    build_index(CORPUS, tmp_path / "index", kind, encoder)  # type: ignore[arg-type]
    for retriever in (opened(kind), open_index(tmp_path / "index", encoder)):  # type: ignore[arg-type]
        assert ids(retriever, ["Bergen town of rain"], 2) == [["p1", "p3"]]
        assert ids(retriever, ["capital"], 2)[0] == ["p0", "p2"]
