"""Batch the searches of many threads: the next search answers all requests that arrive during the current one."""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from rrl.retrieval.retriever import Hit, Retriever


class SearchRequest(NamedTuple):
    """A call of `BatchedSearches.search` that waits for its result."""

    queries: list[str]
    k: int
    result: "Future[list[list[Hit]]]"


class BatchedSearches:
    """`Retriever.search` for many threads. A request starts immediately if no search is running.

    Requests that arrive during a search wait, and the next search answers all of them together. For an index over embeddings,
    this is faster than a search for each request, because the encoder embeds their queries in one batch.
    """

    def __init__(self, retriever: Retriever, max_queries: int = 1024) -> None:
        """Add requests to a batch until it has `max_queries` queries or more; the last request is not split."""
        self.retriever, self.max_queries = retriever, max_queries
        self._requests: queue.SimpleQueue[SearchRequest] = queue.SimpleQueue()
        threading.Thread(target=self._answer_requests, name="rrl-batched-searches", daemon=True).start()

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the k best passages of each query. Raises the errors of `Retriever.search`."""
        request = SearchRequest(list(queries), k, Future())
        self._requests.put(request)
        return request.result.result()

    def _answer_requests(self) -> None:
        """Loop forever: take a batch of waiting requests and answer it, with one search for each k."""
        while True:
            batch = [self._requests.get()]
            size = len(batch[0].queries)
            while size < self.max_queries:
                try:
                    batch.append(self._requests.get_nowait())
                except queue.Empty:
                    break
                size += len(batch[-1].queries)
            for k in dict.fromkeys(request.k for request in batch):
                self._search_batch([request for request in batch if request.k == k], k)

    def _search_batch(self, batch: list[SearchRequest], k: int) -> None:
        """Search for all requests at once. If that fails, search for each alone, so that a bad request fails alone."""
        try:
            queries = [query for request in batch for query in request.queries]
            rankings = self.retriever.search(queries, k)
            if len(rankings) != len(queries):
                raise ValueError(
                    f"the retriever returned {len(rankings)} rankings for {len(queries)} queries"
                )
            hits = iter(rankings)
            for request in batch:
                request.result.set_result([next(hits) for _ in request.queries])
        except BaseException as error:
            if len(batch) == 1:
                batch[0].result.set_exception(error)
                return
            for request in batch:
                self._search_batch([request], k)
