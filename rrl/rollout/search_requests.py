"""The searches that the slots and workflows of one scheduler wait for.

A query first waits for an embedding, if the retriever needs one. Then it is searched (`rrl.rollout.searches`). Equal queries
share a search.
"""

import collections

import numpy as np
from jaxtyping import Float, Int

from rrl.rollout.exchange import ExchangeSizes
from rrl.rollout.searches import SearchOutcome, SearchRunner

Requester = int | tuple[int, int]
"""Who requested a search: a slot, or (workflow, index of the request in what the workflow yielded)."""


class SearchRequests:
    """All queries of one scheduler that have not been answered, and who requested them."""

    def __init__(self, runner: SearchRunner, sizes: ExchangeSizes) -> None:
        """Set up without requests. `runner` searches; `sizes` limits the queries that are embedded together."""
        self.runner, self._sizes = runner, sizes
        self.requesters: dict[str, list[Requester]] = {}
        """All requesters of each query that waits, is embedded or is searched."""
        self.waiting = collections.deque[str]()
        """Queries that wait for an embedding. If the retriever needs none, they wait for the start of their search."""
        self.being_embedded: list[str] = []
        """Queries that the device embeds now."""
        self.failed = 0
        """Failed searches. A search that several requesters share counts once for each of them."""
        self._queries: dict[int, tuple[str, ...]] = {}
        """Queries of each slot that waits for passages."""
        self._outcomes: dict[int, dict[str, SearchOutcome]] = {}
        """Outcomes of the ended searches of each slot in `_queries`, by query."""

    def __contains__(self, slot: int) -> bool:
        """Whether `slot` waits for passages."""
        return slot in self._queries

    def add(self, requester: Requester, query: str) -> None:
        """Search for `query`. For a slot, call `add_slot` instead."""
        if query in self.requesters:
            self.requesters[query].append(requester)
        else:
            self.requesters[query] = [requester]
            self.waiting.append(query)

    def add_slot(self, slot: int, queries: tuple[str, ...]) -> None:
        """Search for all queries of a slot."""
        self._queries[slot], self._outcomes[slot] = queries, {}
        for query in dict.fromkeys(queries):
            self.add(slot, query)

    def take_ready(
        self, embeddings: Float[np.ndarray, "Q E"]
    ) -> tuple[list[str], Float[np.ndarray, "queries E"] | None]:
        """Return the queries whose search can start, and their embeddings; None if the retriever needs none.

        A query whose passages are in the retriever's cache is not embedded: the next `runner.poll` returns them.

        Args:
          embeddings: those of the queries in `being_embedded`, then padding.
        """
        if not self._needs_embeddings:
            ready = list(self.waiting)
            self.waiting.clear()
            return ready, None
        ready, self.being_embedded = self.being_embedded, []
        not_cached = (query for query in self.waiting if not self.runner.take_cached(query))
        self.waiting = collections.deque(not_cached)
        return ready, embeddings[: len(ready)]

    def take_for_embedding(self) -> Int[np.ndarray, "Q query_tokens"]:
        """Return the token ids of the next queries to embed, padded to `wake_threshold` queries."""
        token_ids = self._sizes.empty_queries()
        if self.waiting and self._needs_embeddings:
            assert self.runner.retriever is not None
            count = min(self._sizes.wake_threshold, len(self.waiting))
            self.being_embedded = [self.waiting.popleft() for _ in range(count)]
            ids = self.runner.retriever.tokenize(self.being_embedded)
            token_ids[:count] = ids[:, : self._sizes.query_tokens]
        return token_ids

    def end(self, query: str, outcome: SearchOutcome) -> list[Requester]:
        """Record the outcome of an ended search.

        Returns:
          the requesters whose results are complete: each request of a workflow, and each slot whose searches have all ended.
        """
        requesters = self.requesters.pop(query)
        self.failed += len(requesters) * (outcome is None)
        complete: list[Requester] = []
        for requester in requesters:
            if isinstance(requester, int):
                outcomes = self._outcomes[requester]
                outcomes[query] = outcome
                if len(outcomes) < len(set(self._queries[requester])):
                    continue
            complete.append(requester)
        return complete

    def take_outcomes(self, slot: int) -> list[tuple[str, SearchOutcome]]:
        """Return (query, outcome) for each query of a slot whose searches have all ended, in the order of the queries."""
        queries, outcomes = self._queries.pop(slot), self._outcomes.pop(slot)
        return [(query, outcomes[query]) for query in queries]

    def searching_slots(self) -> list[int]:
        """Return the slots with a query that is being searched."""
        requesters = (requester for query in self.runner.queries for requester in self.requesters[query])
        return [requester for requester in requesters if isinstance(requester, int)]

    @property
    def _needs_embeddings(self) -> bool:
        return self.runner.retriever is not None and self.runner.retriever.needs_embeddings
