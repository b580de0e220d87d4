"""Searches of many threads joined: whatever is asked while one search runs is the next one, all of it at once."""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from rrl.retrieval.retriever import Hit, Retriever

Asked = tuple[list[str], int, "Future[list[list[Hit]]]"]


class BatchedSearches:
    """`search` as `Retriever.search`, for many threads: a request alone waits for nobody, many at a time cost one search.

    An index answers a hundred queries in little more time than one, and encodes them in one batch.
    """

    def __init__(self, retriever: Retriever, most: int = 1024) -> None:
        """`most` queries go into one search, unless a single request has more."""
        self.retriever, self.most = retriever, most
        self._asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="rrl-joined", daemon=True).start()

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The k best passages of each query; raises what the search raised."""
        answer: Future[list[list[Hit]]] = Future()
        self._asked.put((list(queries), k, answer))
        return answer.result()

    def _work(self) -> None:
        while True:
            batch = [self._asked.get()]
            size = len(batch[0][0])
            while size < self.most:
                try:
                    batch.append(self._asked.get_nowait())
                except queue.Empty:
                    break
                size += len(batch[-1][0])
            for k in dict.fromkeys(k for _, k, _ in batch):
                self._answer([asked for asked in batch if asked[1] == k], k)

    def _answer(self, batch: list[Asked], k: int) -> None:
        """One search for all; where it fails, each request gets its own, so that one bad request spoils no other."""
        try:
            hits = iter(self.retriever.search([query for queries, *_ in batch for query in queries], k))
            for queries, _, answer in batch:
                answer.set_result([next(hits) for _ in queries])
        except BaseException as error:
            if len(batch) == 1:
                batch[0][2].set_exception(error)
                return
            for asked in batch:
                self._answer([asked], k)
