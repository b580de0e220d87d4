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
from rrl.errors import UserError
from rrl.retrieval.retriever import Retriever

GRACE = 0.01
"""Seconds that a search is waited for at once, where searches have been that fast: its rows decode again sooner than if it had
to be polled."""

NAP = 0.05
"""Seconds that a host with nothing else to do waits for searches before it lets the device look around."""

Found = list[Passage] | None
"""None: the search failed."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """Queries that are searched together."""

    queries: list[str]
    vectors: Float[np.ndarray, "Q E"] | None
    began: float
    ended: concurrent.futures.Future


class Searches:
    """The searches of one host: of each query one at a time."""

    def __init__(self, retriever: Retriever | None, top_k: int, seconds: float, told: set[type]) -> None:
        """`told` holds the kinds of search error that were logged already, and takes new ones; a search that takes longer
        than `seconds` is given up."""
        self.retriever, self.top_k, self.limit, self.told = retriever, top_k, seconds, told
        self.seconds = 0.0
        """That searches took, those side by side added up."""
        self._flying: list[_Batch] = []
        self._recalled: list[tuple[str, Found]] = []
        self._typical = 0.0

    def __len__(self) -> int:
        """Batches in flight."""
        return len(self._flying)

    @property
    def queries(self) -> list[str]:
        """In flight."""
        return [query for batch in self._flying for query in batch.queries]

    def recall(self, query: str) -> bool:
        """Whether the retriever remembers what it found for it; then `done` gives that, and nothing need be searched."""
        hits = None if self.retriever is None else self.retriever.recall(query, self.top_k)
        if hits is None:
            return False
        self._recalled.append((query, [hit.passage for hit in hits]))
        return True

    def submit(self, queries: Sequence[str], vectors: Float[np.ndarray, "Q E"] | None) -> None:
        """Starts a search of some queries."""
        batch = self._start(list(queries), None if vectors is None else vectors.copy(), time.perf_counter())
        if self._typical <= GRACE:
            concurrent.futures.wait([batch.ended], GRACE)

    def _start(self, queries: list[str], vectors: np.ndarray | None, began: float) -> _Batch:
        batch = _Batch(queries, vectors, began, concurrent.futures.Future())
        self._flying.append(batch)
        # A daemon, so that a search that never ends does not keep the program from ending.
        threading.Thread(target=self._search, args=(batch,), name="rrl-search", daemon=True).start()
        return batch

    def done(self, *, wait: float = 0.0) -> list[tuple[str, Found]]:
        """What has ended: query and passages. For `wait` seconds there is nothing else to do.

        Raises UserError for what the retriever cannot be asked at all.
        """
        if wait and self._flying and not self._recalled:
            futures = [batch.ended for batch in self._flying]
            concurrent.futures.wait(futures, wait, return_when=concurrent.futures.FIRST_COMPLETED)
        now = time.perf_counter()
        over = [batch for batch in self._flying if batch.ended.done() or now - batch.began >= self.limit]
        found, self._recalled = self._recalled, []
        for batch in over:
            self._flying.remove(batch)
            seconds = now - batch.began
            passages: Sequence[Found] = [None] * len(batch.queries)
            if not batch.ended.done():
                self._tell(batch, TimeoutError(f"no answer in {self.limit:g} s"))
            elif not isinstance(result := batch.ended.result(), Exception):
                passages, seconds = result
            elif len(batch.queries) > 1:  # one of them may be to blame: each by itself, until the same time
                for place, query in enumerate(batch.queries):
                    vector = None if batch.vectors is None else batch.vectors[place : place + 1]
                    self._start([query], vector, batch.began)
                continue
            else:
                self._tell(batch, result)
            self.seconds += seconds
            self._typical += 0.3 * (seconds - self._typical)
            found += zip(batch.queries, passages, strict=True)
        return found

    def _search(self, batch: _Batch) -> None:
        """In a thread. The policy is told that its search failed, whatever the reason was; the batch goes on."""
        try:
            if self.retriever is None:
                batch.ended.set_result(([[] for _ in batch.queries], 0.0))
                return
            hits = self.retriever.search(batch.queries, self.top_k, batch.vectors)
            passages = [[hit.passage for hit in of_one] for of_one in hits]
            batch.ended.set_result((passages, time.perf_counter() - batch.began))
        except UserError as error:  # of the settings: no other search would do better
            batch.ended.set_exception(error)
        except Exception as error:
            batch.ended.set_result(error)
        except BaseException as error:
            batch.ended.set_exception(error)

    def _tell(self, batch: _Batch, error: Exception) -> None:
        if type(error) not in self.told:
            self.told.add(type(error))
            logging.getLogger(__name__).warning(
                "search failed for %s: %r (told once for each kind of error; searches_failed counts them)",
                ", ".join(map(repr, batch.queries)),
                error,
            )
