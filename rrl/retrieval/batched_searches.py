"""Batch the searches of many threads: the next search answers all requests that arrive during the current one."""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from rrl.retrieval.retriever import Hit, Retriever

SearchRequest = tuple[list[str], int, "Future[list[list[Hit]]]"]


class BatchedSearches:
    """`Retriever.search` for many threads. A single request runs at once; concurrent requests share one search.

    An index answers a hundred queries in little more time than one, and encodes them in one batch.
    """

    def __init__(self, retriever: Retriever, max_queries: int = 1024) -> None:
        """Put at most `max_queries` queries into one search, unless a single request has more."""
        self.retriever, self.max_queries = retriever, max_queries
        self._requests: queue.SimpleQueue[SearchRequest] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="rrl-batched-searches", daemon=True).start()

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the k best passages of each query; raise what the search raised."""
        future: Future[list[list[Hit]]] = Future()
        self._requests.put((list(queries), k, future))
        return future.result()

    def _work(self) -> None:
        while True:
            batch = [self._requests.get()]
            size = len(batch[0][0])
            while size < self.max_queries:
                try:
                    batch.append(self._requests.get_nowait())
                except queue.Empty:
                    break
                size += len(batch[-1][0])
            for k in dict.fromkeys(k for _, k, _ in batch):
                self._search_batch([request for request in batch if request[1] == k], k)

    def _search_batch(self, batch: list[SearchRequest], k: int) -> None:
        """Search for all requests at once. If that fails, search for each alone, so that a bad request fails alone."""
        try:
            hits = iter(self.retriever.search([query for queries, *_ in batch for query in queries], k))
            for queries, _, future in batch:
                future.set_result([next(hits) for _ in queries])
        except BaseException as error:
            if len(batch) == 1:
                batch[0][2].set_exception(error)
                return
            for request in batch:
                self._search_batch([request], k)
