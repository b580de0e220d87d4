"""Searches in threads, so that no episode waits for another's search. Read `SearchRunner` first."""

import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from rrl.data.passages import Passage
from rrl.errors import UserError, describe_error
from rrl.retrieval.retriever import Hit, Retriever
from rrl.text.characters import replace_lone_surrogates

FAST_SEARCH_SECONDS = 0.01
"""If searches take at most this long on average, `submit` waits up to this time for the result, so that the poll
that follows returns it. Without this wait, even a fast search would be returned one exchange later."""

IDLE_WAIT_SECONDS = 0.05
"""Seconds that a scheduler with nothing else to do waits for searches before it returns to the device."""

MAX_RETRY_BATCHES = 32
"""Maximum number of smaller batches into which a failed batch is split, down to single queries."""

LATE_FRACTION = 0.5
"""After this share of the time limit, each query of a batch of at most MAX_RETRY_BATCHES queries is also searched alone, so that
one query that hangs does not fail the others. A larger batch may simply take long."""

SearchOutcome = list[Passage] | None
"""The passages of a search; None if it failed."""


@dataclasses.dataclass(eq=False, slots=True)
class _SearchBatch:
    """Queries that are searched in one call of the retriever. Times are those of `time.perf_counter`."""

    queries: list[str]
    started: float
    deadline: float
    """When the time limit of its queries ends."""
    future: concurrent.futures.Future = dataclasses.field(default_factory=concurrent.futures.Future)
    """Its result: a list of passages per query, or the Exception with which the search failed."""
    seconds: float = 0.0
    """Duration. 0 until the search has succeeded."""


@dataclasses.dataclass(eq=False, slots=True)
class _InFlightQuery:
    """A query that is being searched."""

    text: str
    vector: Float[np.ndarray, "1 E"] | None
    started: float
    batches: list[_SearchBatch]
    """The batches that contain the query, in the order of their start: the first attempt, then retries in smaller batches,
    down to one with this query alone."""


class InFlightSearches:
    """What all schedulers of one run share: the queries in flight, and the kinds of error that were logged."""

    def __init__(self, logged_errors: set[type] | None = None) -> None:
        self.logged_errors = set() if logged_errors is None else logged_errors
        self.by_query: dict[str, _InFlightQuery] = {}
        self.lock = threading.Lock()
        """Guards `by_query` and the batches of its queries."""


class SearchRunner:
    """Runs the searches of one scheduler. Schedulers of one run share the search of a query (see `submit`)."""

    def __init__(
        self,
        retriever: Retriever | None,
        top_k: int,
        time_limit: float,
        in_flight: InFlightSearches | None = None,
    ) -> None:
        """Set up without starting a search.

        Args:
          retriever: None: every search finds nothing.
          top_k: passages per search.
          time_limit: time limit of a search in seconds; a slower one fails.
          in_flight: shared by all schedulers of a run. None: not shared.
        """
        self.retriever, self.top_k, self.time_limit = retriever, top_k, time_limit
        self.in_flight = in_flight or InFlightSearches()
        self.seconds = 0.0
        """Sum of the durations of all batches; concurrent ones add up."""
        self._queries: list[_InFlightQuery] = []
        self._batches: list[_SearchBatch] = []
        """Batches that this runner started and has not added to `seconds` yet."""
        self._cached: list[tuple[str, SearchOutcome]] = []
        """(query, passages) pairs from the retriever's cache, for the next `poll`."""
        self._mean_seconds = 0.0
        """Moving average of the duration of a batch."""

    def __len__(self) -> int:
        """Number of queries in flight."""
        return len(self._queries)

    @property
    def queries(self) -> list[str]:
        """The queries in flight."""
        return [query.text for query in self._queries]

    def take_cached(self, query: str) -> bool:
        """Return whether the retriever has the passages of `query` in its cache. If so, `poll` returns them next."""
        hits = None if self.retriever is None else self.retriever.cached_hits(query, self.top_k)
        if hits is None:
            return False
        self._cached.append((query, list(map(_readable, hits))))
        return True

    def submit(self, queries: Sequence[str], vectors: Float[np.ndarray, "Q E"] | None) -> None:
        """Start a search of `queries`. A query that is already in flight shares that search, unless LATE_FRACTION of its time
        limit has passed."""
        new, now = list[_InFlightQuery](), time.perf_counter()
        with self.in_flight.lock:
            for index, text in enumerate(queries):
                query = self.in_flight.by_query.get(text)
                if query is None or now - query.started >= LATE_FRACTION * self.time_limit:
                    vector = None if vectors is None else vectors[index : index + 1].copy()
                    query = self.in_flight.by_query[text] = _InFlightQuery(text, vector, now, [])
                    new.append(query)
                self._queries.append(query)
            if new:
                self._start(new)
        if self._mean_seconds <= FAST_SEARCH_SECONDS:
            concurrent.futures.wait(self._futures(self._queries[-len(queries) :]), FAST_SEARCH_SECONDS)

    def _start(self, queries: Sequence[_InFlightQuery]) -> None:
        """Search queries in one batch, in its own thread."""
        texts, started = [query.text for query in queries], time.perf_counter()
        batch = _SearchBatch(texts, started, queries[0].started + self.time_limit)
        vectors = [query.vector for query in queries if query.vector is not None]
        joined = np.concatenate(vectors) if vectors else None
        for query in queries:
            query.batches.append(batch)
        self._batches.append(batch)
        # A daemon thread: a search that never ends must not keep the program from exiting.
        threading.Thread(target=self._search, args=(batch, joined), name="rrl-search", daemon=True).start()

    def poll(self, *, wait: float = 0.0) -> list[tuple[str, SearchOutcome]]:
        """Return the searches that have ended, as (query, passages or None).

        Args:
          wait: if none has ended, seconds to wait for one.

        Raises:
          UserError: the retriever refused the request itself, for example because of an invalid setting.
        """
        ended = self._collect()
        if wait and self._queries and not ended:
            first = concurrent.futures.FIRST_COMPLETED
            concurrent.futures.wait(self._futures(self._queries), wait, return_when=first)
            ended = self._collect()
        return ended

    def _futures(self, queries: Sequence[_InFlightQuery]) -> set[concurrent.futures.Future]:
        with self.in_flight.lock:
            futures = {batch.future for query in queries for batch in query.batches}
        return {future for future in futures if not future.done()}

    def _collect(self) -> list[tuple[str, SearchOutcome]]:
        """Return the searches that have ended. Search again each query whose batch failed or is late (`_needs_retry`)."""
        now, queries = time.perf_counter(), self._queries
        ended, self._cached, self._queries = self._cached, [], []
        retries: list[_InFlightQuery] = []
        with self.in_flight.lock:
            for query in queries:
                if (result := self._result(query, now)) is None:
                    self._queries.append(query)
                    if self._needs_retry(query, now):
                        retries.append(query)
                    continue
                if self.in_flight.by_query.get(query.text) is query:
                    del self.in_flight.by_query[query.text]
                if isinstance(result, Exception):
                    self._log(query.text, result)
                    result = None
                ended.append((query.text, result))
            batch_count = min(MAX_RETRY_BATCHES, len(retries))
            for index in range(batch_count):
                self._start(retries[index::batch_count])
        self._add_durations(now)
        return ended

    def _add_durations(self, now: float) -> None:
        """Add the durations of ended batches to `seconds` and the moving average. A batch past its deadline counts as ended."""
        batches, self._batches = self._batches, []
        for batch in batches:
            if not batch.future.done() and now < batch.deadline:
                self._batches.append(batch)
                continue
            self.seconds += (seconds := batch.seconds or time.perf_counter() - batch.started)
            self._mean_seconds += 0.3 * (seconds - self._mean_seconds)

    def _result(self, query: _InFlightQuery, now: float) -> list[Passage] | Exception | None:
        """Return the passages of a query, or why its search failed; None if it is still running."""
        error: Exception | None = None
        for batch in query.batches:
            if batch.future.done():
                result = batch.future.result()
                if not isinstance(result, Exception):
                    return result[batch.queries.index(query.text)]
                error = result
        last = query.batches[-1]
        if now - query.started >= self.time_limit:
            return error or TimeoutError(f"no answer in {self.time_limit:g} s")
        return error if last.future.done() and len(last.queries) == 1 else None

    def _needs_retry(self, query: _InFlightQuery, now: float) -> bool:
        """Return whether to search a query in a smaller batch: another query of its batch may have failed or delayed it."""
        last, first_try = query.batches[-1], len(query.batches) == 1
        late = (
            first_try
            and len(last.queries) <= MAX_RETRY_BATCHES
            and now - query.started >= LATE_FRACTION * self.time_limit
        )
        return len(last.queries) > 1 and (last.future.done() or late)

    def _search(self, batch: _SearchBatch, vectors: Float[np.ndarray, "Q E"] | None) -> None:
        """Search a batch; runs in its own thread. An Exception becomes the batch's result, so that the run goes on."""
        try:
            passages = self._passages(batch.queries, vectors)
            batch.seconds = time.perf_counter() - batch.started
            batch.future.set_result(passages)
        except UserError as error:  # an invalid setting: every other search would fail too
            batch.future.set_exception(error)
        except Exception as error:
            batch.future.set_result(error)
        except BaseException as error:
            batch.future.set_exception(error)

    def _passages(self, queries: list[str], vectors: Float[np.ndarray, "Q E"] | None) -> list[list[Passage]]:
        if self.retriever is None:
            return [[] for _ in queries]
        hits = self.retriever.search(queries, self.top_k, vectors)
        passages = [list(map(_readable, hits_of_query)) for hits_of_query in hits]
        if len(passages) != len(queries):
            raise ValueError(
                f"the retriever answered {len(queries)} queries with {len(passages)} lists of passages"
            )
        return passages

    def _log(self, query: str, error: Exception) -> None:
        if type(error) not in self.in_flight.logged_errors:
            self.in_flight.logged_errors.add(type(error))
            logging.getLogger(__name__).warning(
                "search failed for %r: %s (logged once per kind of error; searches_failed counts all failures)",
                query,
                describe_error(error),
            )


def _readable(hit: Hit) -> Passage:
    """Return the passage with lone surrogates replaced, so that it can be read by the policy and written to files."""
    passage = hit.passage
    if not isinstance(passage.title, str) or not isinstance(passage.text, str):
        raise ValueError(f"title and text must be strings: {passage!r}")
    return dataclasses.replace(
        passage, title=replace_lone_surrogates(passage.title), text=replace_lone_surrogates(passage.text)
    )
