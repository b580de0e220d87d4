"""Top-k with the same order in every index: higher score first, then lower passage position."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

MARGIN = 8
"""Candidates beyond k that are rescored, so that float32 rounding near rank k cannot lose a passage."""

MAX_RESCORE_ELEMENTS = 16 << 20
"""Elements of candidates' embeddings that `rescore` reads at once, to bound memory. A single query may exceed it."""

NO_PASSAGE = -1
"""Id that fills a ranking of fewer than k passages."""

Ranking = tuple[Int[np.ndarray, "Q k"], Float[np.ndarray, "Q k"]]
"""Ids (int64, filled with `NO_PASSAGE`) and scores (float32, filled with -inf), best first."""


def top_k(scores: Float[np.ndarray, "N"], k: int) -> Int[np.ndarray, "k"]:
    """Return the positions of the k highest scores. Ties are ordered by position, so `np.partition` cannot affect the result."""
    count = scores.shape[0]
    k = min(k, count)
    if k < count:
        threshold = np.partition(scores, count - k)[count - k]
        # Keep everything tied with the k-th score; otherwise the partition would choose among the ties.
        candidates = np.flatnonzero(scores >= threshold)
    else:
        candidates = np.arange(count)
    order = np.argsort(-scores[candidates], kind="stable")
    return candidates[order[:k]]


def empty_ranking(queries: int, k: int) -> Ranking:
    """Return a ranking of no passages."""
    return np.full((queries, k), NO_PASSAGE, np.int64), np.full((queries, k), -np.inf, np.float32)


def rescore(
    embeddings: Float[np.ndarray, "N E"],
    queries: Float[np.ndarray, "Q E"],
    candidates: Sequence[Int[np.ndarray, "C"]],
    k: int,
) -> Ranking:
    """Rank each query's candidates by inner products in float64, each summed separately.

    The last bits of a matrix product depend on the batch; those of a separate sum do not. So a query's ranking does not depend
    on the other queries of a batch. If there are many candidates, float32 scores first reduce them to k + `MARGIN`, which is
    much faster.
    """
    ids, scores = empty_ranking(len(queries), k)
    width = max(map(len, candidates), default=0)
    step = max(1, MAX_RESCORE_ELEMENTS // max(1, width * embeddings.shape[1]))
    for start in range(0, len(queries), step):
        batch = slice(start, start + step)
        vectors, positions = queries[batch], _padded(candidates[batch], len(embeddings))
        if positions.shape[1] > k + MARGIN:
            approximate = np.matmul(_gather(embeddings, positions), vectors[:, :, None])[..., 0]
            best = _best(np.where(positions < len(embeddings), approximate, -np.inf), k + MARGIN)
            positions = np.sort(np.take_along_axis(positions, best, axis=1), axis=1)
        products = _gather(embeddings, positions).astype(np.float64) * vectors.astype(np.float64)[:, None]
        exact = np.where(positions < len(embeddings), products.sum(-1), -np.inf)
        best = _best(exact, k)
        exact, positions = (np.take_along_axis(part, best, axis=1) for part in (exact, positions))
        ids[batch, : best.shape[1]] = np.where(positions < len(embeddings), positions, NO_PASSAGE)
        scores[batch, : best.shape[1]] = exact
    return ids, scores


def _padded(candidates: Sequence[Int[np.ndarray, "C"]], end: int) -> Int[np.ndarray, "Q C"]:
    """Return each query's candidates in ascending order, padded with `end`."""
    positions = np.full((len(candidates), max(map(len, candidates))), end, np.int64)
    for row, positions_of_query in zip(positions, candidates):
        row[: len(positions_of_query)] = positions_of_query
    return np.sort(positions, axis=1)


def _gather(
    embeddings: Float[np.ndarray, "N E"], positions: Int[np.ndarray, "Q C"]
) -> Float[np.ndarray, "Q C E"]:
    """Return the embeddings at these positions; any vector for padding, which callers mask."""
    return embeddings[np.minimum(positions, len(embeddings) - 1)]


def _best(scores: Float[np.ndarray, "Q C"], k: int) -> Int[np.ndarray, "Q k"]:
    """Apply `top_k` to every row."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def ranking_recall(ranked: Int[np.ndarray, "Q k"], expected: Int[np.ndarray, "Q k"]) -> float:
    """Return the recall of a ranking: the mean share of the expected ids that are in `ranked`, in [0, 1]."""
    expected_sets = [set(row) - {NO_PASSAGE} for row in expected.tolist()]
    return float(
        np.mean(
            [
                len(wanted & set(row)) / max(1, len(wanted))
                for wanted, row in zip(expected_sets, ranked.tolist())
            ]
        )
    )
