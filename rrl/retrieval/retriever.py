"""The one `Retriever`: queries in, ranked passages out, whatever index stands behind it."""

import collections
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from jaxtyping import Float, Int

from rrl.data.passages import Passage
from rrl.errors import UserError
from rrl.retrieval.ranking import NOTHING, Ranking

if TYPE_CHECKING:  # BM25 needs no JAX, so opening it does not import any.
    from rrl.retrieval.encode import TextEncoder

MAX_QUERY_CHARACTERS = 4_096
"""Longer queries are cut: no encoder reads further, and a runaway policy must not stall the search."""

Found = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """One passage that was found."""

    passage: Passage
    score: float
    """BM25 score, or inner product; comparable within one index only."""


class Index(Protocol):
    """What a `Retriever` asks of an index; `search` must be thread-safe and free of JAX."""

    kind: str
    needs_embeddings: bool

    def search(self, queries: Sequence[str], k: int, embeddings: Any) -> Ranking:
        """Rank the passages for each query, by its text or its embedding."""


@dataclasses.dataclass(frozen=True)
class RetrieverStats:
    """Counts since the retriever was opened."""

    calls: int = 0
    queries: int = 0
    searched: int = 0
    """Queries that reached the index; the rest were repeated in the call, cached or empty."""
    cache_hits: int = 0
    empty: int = 0
    """Queries without any text, and queries that found nothing."""
    seconds: float = 0.0
    """Time inside `search`, summed over threads."""


class Retriever:
    """Thread-safe search over one corpus. `tokenize` and `search` use NumPy only and never call JAX.

    For an index over embeddings the caller embeds `tokenize(queries)` with `encoder` on the device and hands the
    result to `search`; outside of jit `embed` does both.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        index: Index,
        text_encoder: "TextEncoder | None" = None,
        cache_size: int = 65_536,
    ):
        if index.needs_embeddings and text_encoder is None:
            raise UserError(f"retriever: a {index.kind} index needs the encoder it was built with; got none.")
        self.passages = passages
        self.kind = index.kind
        self.needs_embeddings = index.needs_embeddings
        self.text_encoder = text_encoder if index.needs_embeddings else None
        self._index = index
        self._cache: collections.OrderedDict[tuple[str, int], Found] = collections.OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._stats = RetrieverStats()

    @property
    def encoder(self) -> Any:
        """The query encoder module, or None where queries need no embedding."""
        return self.text_encoder.encoder if self.text_encoder else None

    @property
    def stats(self) -> RetrieverStats:
        """A snapshot of the counts."""
        with self._lock:
            return self._stats

    def tokenize(self, queries: Sequence[str]) -> Int[np.ndarray, "Q T"]:
        """Encoder tokens of the queries, prefix included, int32, padded to the fixed width `query_tokens`."""
        return self._need_encoder().tokenize_queries([query[:MAX_QUERY_CHARACTERS] for query in queries])

    def embed(self, queries: Sequence[str]) -> Float[np.ndarray, "Q E"]:
        """Embeddings of the queries, by JAX: for callers outside of jit and of host callbacks."""
        return self._need_encoder().embed_queries([query[:MAX_QUERY_CHARACTERS] for query in queries])

    def search(
        self, queries: Sequence[str], k: int, embeddings: Float[np.ndarray, "Q E"] | None = None
    ) -> list[list[Hit]]:
        """The k best passages of each query, best first, ties by position; fewer where fewer are found.

        A query without text finds nothing. A query repeated in the call or asked before is not searched again: its
        text stands for its embedding.

        Args:
          queries: any strings; cut at `MAX_QUERY_CHARACTERS`.
          k: at least 1; more than the corpus holds gives the whole corpus.
          embeddings: unit vectors, one a query; needed exactly if `needs_embeddings`.

        Raises: UserError for k < 1 or embeddings that are missing or of the wrong shape.
        """
        started = time.perf_counter()
        self._check(queries, k, embeddings)
        texts = [query[:MAX_QUERY_CHARACTERS].strip() for query in queries]
        first = {text: row for row, text in reversed(list(enumerate(texts))) if text}
        found: dict[str, Found] = {"": ()}
        with self._lock:
            for text in first:
                if (text, k) in self._cache:
                    self._cache.move_to_end((text, k))
                    found[text] = self._cache[text, k]
        hits = len(found) - 1
        missing = sorted((row, text) for text, row in first.items() if text not in found)
        if missing:
            rows = [row for row, _ in missing]
            vectors = None if embeddings is None else np.asarray(embeddings, np.float32)[rows]
            ids, scores = self._index.search([text for _, text in missing], k, vectors)
            for (_, text), row_ids, row_scores in zip(missing, ids.tolist(), scores.tolist()):
                found[text] = tuple((i, s) for i, s in zip(row_ids, row_scores) if i != NOTHING)
        with self._lock:
            for _, text in missing:
                self._cache[text, k] = found[text]
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
            old = self._stats
            self._stats = RetrieverStats(
                calls=old.calls + 1,
                queries=old.queries + len(texts),
                searched=old.searched + len(missing),
                cache_hits=old.cache_hits + hits,
                empty=old.empty + sum(not found[text] for text in texts),
                seconds=old.seconds + time.perf_counter() - started,
            )
        return [[Hit(self.passages[i], score) for i, score in found[text]] for text in texts]

    def _need_encoder(self) -> "TextEncoder":
        if self.text_encoder is None:
            raise UserError(f"retriever: a {self.kind} index searches text; it has no query encoder.")
        return self.text_encoder

    def _check(self, queries: Sequence[str], k: int, embeddings: Any) -> None:
        if k < 1:
            raise UserError(f"k: got {k}; a search returns at least 1 passage. Give k >= 1.")
        if not self.needs_embeddings:
            return
        if embeddings is None:
            raise UserError(
                f"embeddings: missing; a {self.kind} index needs them. Pass `retriever.embed(queries)`."
            )
        assert self.text_encoder is not None
        wanted = (len(queries), self.text_encoder.dim)
        if np.shape(embeddings) != wanted:
            raise UserError(
                f"embeddings: got shape {np.shape(embeddings)}, wanted {wanted} (queries, dimension)."
            )
