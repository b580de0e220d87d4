"""`Retriever`, the interface to every index: queries in, ranked passages out."""

import collections
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from jaxtyping import Float, Int

from rrl.data.passages import Passage
from rrl.errors import UserError, at_least
from rrl.retrieval.ranking import NO_PASSAGE, Ranking
from rrl.retrieval.stats import RetrieverStats, StatsRecorder

if TYPE_CHECKING:  # Importing it imports JAX, which BM25 does not need.
    from rrl.retrieval.encode import TextEncoder

MAX_QUERY_CHARACTERS = 4_096
"""Longer queries are cut, so that the long queries of a degenerate policy do not slow down the search."""

T = TypeVar("T")
RankedPassages = tuple[tuple[int, float], ...]
"""(position of a passage, score), best first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """One retrieved passage."""

    passage: Passage
    score: float
    """BM25 score, inner product, or score of a search service; comparable within one index only."""


class Index(Protocol):
    """The interface of an index. `search` must be thread-safe and must not call JAX."""

    kind: str
    needs_embeddings: bool

    def search(self, queries: Sequence[str], k: int, embeddings: Any) -> Ranking:
        """Rank the passages for each query, by the query's text or its embedding."""


class SearchFailed(RuntimeError):
    """A search failed: it took too long, or the index or the service raised an error."""


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """Retries and time limit of a search, and its batch size."""

    time_out: float | None = None
    """Time limit of one attempt, in seconds. None: no limit."""
    retries: int = 0
    """Number of attempts after the first."""
    pause: float = 0.1
    """Seconds before the first retry, doubled before each further one."""
    batch: int = 1024
    """Queries in one search. The next batch is embedded while one is searched."""

    def __post_init__(self) -> None:
        at_least(0, self, "retries", "pause")
        at_least(1, self, "batch")
        if self.time_out is not None and not self.time_out > 0:
            raise UserError(f"time_out={self.time_out} must be above 0 seconds, or None for no limit")


class Retriever:
    """Thread-safe search over one corpus.

    `tokenize`, and `search` with embeddings, use NumPy only and never call JAX, so host callbacks may call them. Inside a
    jitted program, the queries of an index over embeddings are embedded on the device: `encoder` embeds `tokenize(queries)`, and
    a host callback passes the embeddings to `search`. Outside jit, `search` embeds the queries itself.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        index: Index,
        text_encoder: "TextEncoder | None" = None,
        cache_size: int = 65_536,
        retry_policy: RetryPolicy | None = None,
    ):
        if index.needs_embeddings and text_encoder is None:
            raise UserError(f"retriever: a {index.kind} index needs the encoder it was built with; got None.")
        self.passages = passages
        self.kind = index.kind
        self.needs_embeddings = index.needs_embeddings
        self.text_encoder = text_encoder if index.needs_embeddings else None
        self._index = index
        self._cache: collections.OrderedDict[tuple[str, int], RankedPassages] = collections.OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._recorder = StatsRecorder()
        self.retry_policy = retry_policy or RetryPolicy()

    @property
    def encoder(self) -> Any:
        """The query encoder module, or None if queries need no embedding."""
        return self.text_encoder.encoder if self.text_encoder else None

    @property
    def stats(self) -> RetrieverStats:
        """A snapshot of counts and latencies."""
        return self._recorder.read()

    def tokenize(self, queries: Sequence[str]) -> Int[np.ndarray, "Q T"]:
        """Return encoder tokens of the queries with prefix, int32, padded to the fixed width `query_tokens`."""
        return self._require_encoder().tokenize_queries([query[:MAX_QUERY_CHARACTERS] for query in queries])

    def embed(self, queries: Sequence[str]) -> Float[np.ndarray, "Q E"]:
        """Return embeddings of the queries, by JAX. Do not call it inside jit or a host callback."""
        return self._require_encoder().embed_queries([query[:MAX_QUERY_CHARACTERS] for query in queries])

    def search(
        self, queries: Sequence[str], k: int, embeddings: Float[np.ndarray, "Q E"] | None = None
    ) -> list[list[Hit]]:
        """Return the k best passages of each query, best first, ties by position; fewer if fewer match.

        A query without text has no hits. A query that is repeated in the call, or cached, is not searched again; the cache key
        is the query's text and k, not its embedding.

        Args:
          queries: any strings; cut at `MAX_QUERY_CHARACTERS`.
          k: at least 1; it may exceed the number of passages in the corpus.
          embeddings: one vector per query, from `encoder`, for an index that needs them. None: the queries that must be searched
            are embedded here, by JAX, which a host callback must not call.

        Raises:
          UserError: k < 1, or embeddings of the wrong shape.
          SearchFailed: every attempt of `retry_policy` was too slow or failed.
        """
        started = time.perf_counter()
        self._check(queries, k, embeddings)
        texts = [query[:MAX_QUERY_CHARACTERS].strip() for query in queries]
        # Backwards, so that the first row of a repeated query remains.
        first_row = {text: row for row, text in reversed(list(enumerate(texts))) if text}
        results: dict[str, RankedPassages] = {"": ()}  # a query without text has no hits
        with self._lock:
            for text in first_row:
                if (text, k) in self._cache:
                    self._cache.move_to_end((text, k))
                    results[text] = self._cache[text, k]
        self._recorder.add(queries=len(texts), cache_hits=len(results) - 1)
        missing = sorted((row, text) for text, row in first_row.items() if text not in results)
        try:
            self._search_batches(missing, k, embeddings, results)
            empty = sum(not results[text] for text in texts)
            self._recorder.add(searched=len(missing), empty=empty)
            return [[Hit(self.passages[i], score) for i, score in results[text]] for text in texts]
        except SearchFailed:
            self._recorder.add(failures=len(missing))
            raise
        finally:
            self._recorder.record_call(time.perf_counter() - started)

    def cached_hits(self, query: str, k: int) -> list[Hit] | None:
        """Return the hits of a query from the cache, without embedding it; None if they are not cached."""
        text = query[:MAX_QUERY_CHARACTERS].strip()
        with self._lock:
            if text and (text, k) not in self._cache:
                return None
            results = self._cache[text, k] if text else ()
            if text:
                self._cache.move_to_end((text, k))
        self._recorder.add(queries=1, cache_hits=int(bool(text)), empty=int(not results))
        return [Hit(self.passages[i], score) for i, score in results]

    def _search_batches(
        self,
        missing: Sequence[tuple[int, str]],
        k: int,
        embeddings: np.ndarray | None,
        results: dict[str, RankedPassages],
    ) -> None:
        """Search for (row, text) pairs batch by batch; add their passages to `results` and the cache."""
        size = self.retry_policy.batch
        batches = [missing[start : start + size] for start in range(0, len(missing), size)]
        if len(batches) <= 1:
            for batch in batches:
                ranking = self._search(batch, k, self._vectors(batch, embeddings))
                self._add_to_cache(batch, k, ranking, results)
            return
        with ThreadPoolExecutor(1) as pool:
            jobs = [
                pool.submit(self._search, batch, k, self._vectors(batch, embeddings)) for batch in batches
            ]
            for batch, job in zip(batches, jobs):
                self._add_to_cache(batch, k, job.result(), results)

    def _vectors(self, batch: Sequence[tuple[int, str]], embeddings: np.ndarray | None) -> np.ndarray | None:
        """Return the embeddings of a batch, from `embeddings` or computed here; None if the index needs none."""
        if not self.needs_embeddings:
            return None
        if embeddings is None:
            return self.embed([text for _, text in batch])
        return np.asarray(embeddings, np.float32)[[row for row, _ in batch]]

    def _search(self, batch: Sequence[tuple[int, str]], k: int, vectors: np.ndarray | None) -> Ranking:
        """Search the index for a batch, with the attempts of `retry_policy`. Raises SearchFailed if all of them fail."""
        texts, retry_policy = [text for _, text in batch], self.retry_policy
        if self.kind != "http":  # the size of a service's corpus is unknown
            k = min(k, max(1, len(self.passages)))
        for attempt in range(retry_policy.retries + 1):
            if attempt:
                self._recorder.add(retries=1)
                time.sleep(retry_policy.pause * 2 ** (attempt - 1))
            try:
                ids, scores = run_with_timeout(
                    retry_policy.time_out, lambda: self._index.search(texts, k, vectors)
                )
                if not len(ids) == len(scores) == len(texts):
                    raise ValueError(
                        f"{len(ids)} rankings with {len(scores)} rows of scores for {len(texts)} queries"
                    )
                return ids, scores
            except UserError:
                raise
            except Exception as error:  # an index may raise anything; callers catch SearchFailed only
                last = error
        raise SearchFailed(
            f"search failed {retry_policy.retries + 1} times in the {self.kind} index: {last!r}"
        ) from last

    def _add_to_cache(
        self, batch: Sequence[tuple[int, str]], k: int, ranking: Ranking, results: dict[str, RankedPassages]
    ) -> None:
        with self._lock:
            for (_, text), ids, scores in zip(batch, *(part.tolist() for part in ranking), strict=True):
                results[text] = tuple((i, s) for i, s in zip(ids, scores) if i != NO_PASSAGE)
                self._cache[text, k] = results[text]
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)

    def _require_encoder(self) -> "TextEncoder":
        if self.text_encoder is None:
            raise UserError(f"retriever: a {self.kind} index searches text; it has no query encoder.")
        return self.text_encoder

    def _check(self, queries: Sequence[str], k: int, embeddings: Any) -> None:
        if k < 1:
            raise UserError(f"k: got {k}; a search returns at least 1 passage. Give k >= 1.")
        if not self.needs_embeddings or embeddings is None:
            return
        assert self.text_encoder is not None
        expected = (len(queries), self.text_encoder.dim)
        if np.shape(embeddings) != expected:
            raise UserError(
                f"embeddings: got shape {np.shape(embeddings)}, expected {expected} (queries, dimension)."
            )


def run_with_timeout(seconds: float | None, work: Callable[[], T]) -> T:
    """Return the result of `work`. Raises TimeoutError after `seconds`; the thread that runs `work` is not stopped."""
    if seconds is None:
        return work()
    done: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((True, work()))
        except BaseException as error:  # raised again below, in the caller's thread
            done.put((False, error))

    # A daemon thread, so that a hanging search cannot keep the process alive.
    threading.Thread(target=run, name="rrl-search", daemon=True).start()
    try:
        succeeded, value = done.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if not succeeded:
        raise value
    return value
