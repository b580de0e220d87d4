"""Searches of many episodes: handed to threads as they come, taken back as they end, so that nobody else waits for them."""

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
"""Seconds that a search is waited for at once, where searches have been that fast: its rows decode again sooner than if it had
to be polled."""

IDLE_WAIT_SECONDS = 0.05
"""Seconds that a host with nothing else to do waits for searches before it lets the device look around."""

MAX_RETRY_BATCHES = 32
"""The queries of a batch that failed are searched again in so many smaller ones at most, down to those of a single query."""

LATE_FRACTION = 0.5
"""After this share of its time, each query of a batch of not more than MAX_RETRY_BATCHES that is still out is searched
alone as well: one
that hangs takes nothing from those that were searched with it. A larger one may just have much to do."""

SearchOutcome = list[Passage] | None
"""None: the search failed."""


@dataclasses.dataclass(eq=False, slots=True)
class _SearchBatch:
    """Queries that are searched together."""

    queries: list[str]
    began: float
    until: float
    """When it is given up."""
    ended: concurrent.futures.Future = dataclasses.field(default_factory=concurrent.futures.Future)
    """Gets what each query found, or an Exception where the search failed."""
    seconds: float = 0.0
    """That it took to find them."""


@dataclasses.dataclass(eq=False, slots=True)
class _InFlightQuery:
    """A query that is being searched for."""

    query: str
    vector: Float[np.ndarray, "1 E"] | None
    began: float
    tries: list[_SearchBatch]
    """The batch that it is part of, and then smaller ones, down to one of its own."""


class InFlightSearches:
    """What the hosts of one run share: queries that any of them is searching for, and the kinds of error that were told."""

    def __init__(self, told: set[type] | None = None) -> None:
        self.told = set() if told is None else told
        self.by_query: dict[str, _InFlightQuery] = {}
        self.lock = threading.Lock()


class SearchRunner:
    """The searches of one host: of each query one at a time, whichever host of the desk asks."""

    def __init__(
        self, retriever: Retriever | None, top_k: int, seconds: float, desk: InFlightSearches | None = None
    ) -> None:
        """A search that takes longer than `seconds` is given up."""
        self.retriever, self.top_k, self.limit, self.desk = (
            retriever,
            top_k,
            seconds,
            desk or InFlightSearches(),
        )
        self.seconds = 0.0
        """That searches took, those side by side added up."""
        self._flying: list[_InFlightQuery] = []
        self._begun: list[_SearchBatch] = []
        """That this host started and has not counted yet."""
        self._recalled: list[tuple[str, SearchOutcome]] = []
        self._typical = 0.0

    def __len__(self) -> int:
        """Queries in flight."""
        return len(self._flying)

    @property
    def queries(self) -> list[str]:
        """In flight."""
        return [flight.query for flight in self._flying]

    def take_cached(self, query: str) -> bool:
        """Whether the retriever remembers what it found for it; then `done` gives that, and nothing need be searched."""
        hits = None if self.retriever is None else self.retriever.recall(query, self.top_k)
        if hits is None:
            return False
        self._recalled.append((query, list(map(_shown, hits))))
        return True

    def submit(self, queries: Sequence[str], vectors: Float[np.ndarray, "Q E"] | None) -> None:
        """Starts a search of some queries, but for those that are being searched for already: what these find is shared."""
        fresh, began = list[_InFlightQuery](), time.perf_counter()
        with self.desk.lock:
            for place, query in enumerate(queries):
                flight = self.desk.by_query.get(query)
                if flight is None or began - flight.began >= LATE_FRACTION * self.limit:
                    vector = None if vectors is None else vectors[place : place + 1].copy()
                    flight = self.desk.by_query[query] = _InFlightQuery(query, vector, began, [])
                    fresh.append(flight)
                self._flying.append(flight)
            if fresh:
                self._start(fresh)
        if self._typical <= FAST_SEARCH_SECONDS:
            concurrent.futures.wait(self._awaited(self._flying[-len(queries) :]), FAST_SEARCH_SECONDS)

    def _start(self, flights: Sequence[_InFlightQuery]) -> None:
        queries, began = [flight.query for flight in flights], time.perf_counter()
        batch = _SearchBatch(queries, began, flights[0].began + self.limit)
        vectors = [flight.vector for flight in flights if flight.vector is not None]
        joined = np.concatenate(vectors) if vectors else None
        for flight in flights:
            flight.tries.append(batch)
        self._begun.append(batch)
        # A daemon, so that a search that never ends does not keep the program from ending.
        threading.Thread(target=self._search, args=(batch, joined), name="rrl-search", daemon=True).start()

    def done(self, *, wait: float = 0.0) -> list[tuple[str, SearchOutcome]]:
        """What has ended: query and passages. For `wait` seconds there is nothing else to do.

        Raises UserError for what the retriever cannot be asked at all.
        """
        found = self._collected()
        if wait and self._flying and not found:
            first = concurrent.futures.FIRST_COMPLETED
            concurrent.futures.wait(self._awaited(self._flying), wait, return_when=first)
            found = self._collected()
        return found

    def _awaited(self, flights: Sequence[_InFlightQuery]) -> set[concurrent.futures.Future]:
        with self.desk.lock:
            tries = {batch.ended for flight in flights for batch in flight.tries}
        return {ended for ended in tries if not ended.done()}

    def _collected(self) -> list[tuple[str, SearchOutcome]]:
        now, flying = time.perf_counter(), self._flying
        found, self._recalled, self._flying = self._recalled, [], []
        again: list[_InFlightQuery] = []
        with self.desk.lock:
            for flight in flying:
                if (result := self._result(flight, now)) is None:
                    self._flying.append(flight)
                    again += [flight] * self._is_tried_again(flight, now)
                    continue
                if self.desk.by_query.get(flight.query) is flight:
                    del self.desk.by_query[flight.query]
                if isinstance(result, Exception):
                    self._tell(flight.query, result)
                    result = None
                found.append((flight.query, result))
            count = min(MAX_RETRY_BATCHES, len(again))
            for part in range(count):
                self._start(again[part::count])
        begun, self._begun = self._begun, []
        for batch in begun:
            if not batch.ended.done() and now < batch.until:
                self._begun.append(batch)
                continue
            self.seconds += (seconds := batch.seconds or time.perf_counter() - batch.began)
            self._typical += 0.3 * (seconds - self._typical)
        return found

    def _result(self, flight: _InFlightQuery, now: float) -> list[Passage] | Exception | None:
        """What it found, or why it failed; None where that is not known yet."""
        error: Exception | None = None
        for batch in flight.tries:
            if batch.ended.done():
                result = batch.ended.result()
                if not isinstance(result, Exception):
                    return result[batch.queries.index(flight.query)]
                error = result
        last = flight.tries[-1]
        if now - flight.began >= self.limit:
            return error or TimeoutError(f"no answer in {self.limit:g} s")
        return error if last.ended.done() and len(last.queries) == 1 else None

    def _is_tried_again(self, flight: _InFlightQuery, now: float) -> bool:
        """Whether others that it was searched with may be to blame: their search failed, or takes long."""
        last, first_try = flight.tries[-1], len(flight.tries) == 1
        late = (
            first_try
            and len(last.queries) <= MAX_RETRY_BATCHES
            and now - flight.began >= LATE_FRACTION * self.limit
        )
        return len(last.queries) > 1 and (last.ended.done() or late)

    def _search(self, batch: _SearchBatch, vectors: Float[np.ndarray, "Q E"] | None) -> None:
        """In a thread. The policy is told that its search failed, whatever the reason was; the others go on."""
        try:
            found = self._passages(batch.queries, vectors)
            batch.seconds = time.perf_counter() - batch.began
            batch.ended.set_result(found)
        except UserError as error:  # of the settings: no other search would do better
            batch.ended.set_exception(error)
        except Exception as error:
            batch.ended.set_result(error)
        except BaseException as error:
            batch.ended.set_exception(error)

    def _passages(self, queries: list[str], vectors: Float[np.ndarray, "Q E"] | None) -> list[list[Passage]]:
        if self.retriever is None:
            return [[] for _ in queries]
        hits = self.retriever.search(queries, self.top_k, vectors)
        found = [list(map(_shown, of_one)) for of_one in hits]
        if len(found) != len(queries):
            raise ValueError(
                f"the retriever answered {len(queries)} queries with {len(found)} lists of passages"
            )
        return found

    def _tell(self, query: str, error: Exception) -> None:
        if type(error) not in self.desk.told:
            self.desk.told.add(type(error))
            logging.getLogger(__name__).warning(
                "search failed for %r: %s (told once for each kind of error; searches_failed counts them)",
                query,
                describe_error(error),
            )


def _shown(hit: Hit) -> Passage:
    """The passage as the policy reads it, and as it can be written down."""
    passage = hit.passage
    if not isinstance(passage.title, str) or not isinstance(passage.text, str):
        raise ValueError(f"title and text must be texts: {passage!r}")
    return dataclasses.replace(
        passage, title=replace_lone_surrogates(passage.title), text=replace_lone_surrogates(passage.text)
    )
