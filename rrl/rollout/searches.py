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
from rrl.retrieval.retriever import Retriever

GRACE = 0.01
"""Seconds that a search is waited for at once, where searches have been that fast: its rows decode again sooner than if it had
to be polled."""

NAP = 0.05
"""Seconds that a host with nothing else to do waits for searches before it lets the device look around."""

Asker = int | tuple[int, int]
"""Who asks: a row, or a workflow and the place in what it asked for."""
Found = list[Passage] | None
"""None: the search failed."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """Queries that are searched together."""

    keys: list[Asker]
    queries: list[str]
    began: float
    ended: concurrent.futures.Future


class Searches:
    """The searches of one host. What is asked under a key comes back under it."""

    def __init__(self, retriever: Retriever | None, top_k: int, seconds: float, told: set[type]) -> None:
        """`told` holds the kinds of search error that were logged already, and takes new ones; a search that takes longer
        than `seconds` is given up."""
        self.retriever, self.top_k, self.limit, self.told = retriever, top_k, seconds, told
        self.seconds = 0.0
        """That searches took, those side by side added up."""
        self.failed = 0
        self._flying: list[_Batch] = []
        self._typical = 0.0

    def __len__(self) -> int:
        """Batches in flight."""
        return len(self._flying)

    @property
    def keys(self) -> set[Asker]:
        """Under which something is in flight."""
        return {key for batch in self._flying for key in batch.keys}

    def submit(
        self, keys: Sequence[Asker], queries: Sequence[str], vectors: Float[np.ndarray, "Q E"] | None
    ) -> None:
        """Starts a search of some queries."""
        batch = _Batch(list(keys), list(queries), time.perf_counter(), concurrent.futures.Future())
        self._flying.append(batch)
        own = None if vectors is None else vectors.copy()
        # A daemon, so that a search that never ends does not keep the program from ending.
        threading.Thread(target=self._search, args=(batch, own), name="rrl-search", daemon=True).start()
        if self._typical <= GRACE:
            concurrent.futures.wait([batch.ended], GRACE)

    def done(self, *, wait: bool) -> list[tuple[Asker, str, Found]]:
        """What has ended: key, query and passages. With `wait` there is nothing else to do, so that it may take `NAP`."""
        if wait and self._flying:
            futures = [batch.ended for batch in self._flying]
            concurrent.futures.wait(futures, NAP, return_when=concurrent.futures.FIRST_COMPLETED)
        now = time.perf_counter()
        over = [batch for batch in self._flying if batch.ended.done() or now - batch.began >= self.limit]
        found: list[tuple[Asker, str, Found]] = []
        for batch in over:
            self._flying.remove(batch)
            seconds = now - batch.began
            passages: Sequence[Found] = [None] * len(batch.keys)
            if not batch.ended.done():
                self._tell(batch, TimeoutError(f"no answer in {self.limit:g} s"))
            elif isinstance(result := batch.ended.result(), Exception):
                self._tell(batch, result)
            else:
                passages, seconds = result
            self.seconds += seconds
            self._typical += 0.3 * (seconds - self._typical)
            found += zip(batch.keys, batch.queries, passages, strict=True)
        return found

    def _search(self, batch: _Batch, vectors: np.ndarray | None) -> None:
        """In a thread. The policy is told that its search failed, whatever the reason was; the batch goes on."""
        try:
            if self.retriever is None:
                batch.ended.set_result(([[] for _ in batch.queries], 0.0))
                return
            hits = self.retriever.search(batch.queries, self.top_k, vectors)
            passages = [[hit.passage for hit in of_one] for of_one in hits]
            batch.ended.set_result((passages, time.perf_counter() - batch.began))
        except Exception as error:
            batch.ended.set_result(error)
        except BaseException as error:
            batch.ended.set_exception(error)

    def _tell(self, batch: _Batch, error: Exception) -> None:
        self.failed += len(batch.keys)
        if type(error) not in self.told:
            self.told.add(type(error))
            logging.getLogger(__name__).warning(
                "search failed for %d queries, the first of which is %r: %r (told once for each kind of error; "
                "searches_failed counts them)",
                len(batch.queries),
                batch.queries[0],
                error,
            )
