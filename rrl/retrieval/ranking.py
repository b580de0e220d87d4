"""Top-k with the same order in every index: higher score first, then lower passage position."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

MARGIN = 8
"""Candidates beyond k that are rescored, so that float32 rounding near rank k cannot lose a passage."""

RESCORED_TOGETHER = 16 << 20
"""Vector components of candidates that are read at once (at least one query's), which bounds the memory."""

NO_PASSAGE = -1
"""Id of an empty place in a ranking: fewer than k passages were retrieved."""

Ranking = tuple[Int[np.ndarray, "Q k"], Float[np.ndarray, "Q k"]]
"""Ids (int64, `NO_PASSAGE` where empty) and scores (float32, -inf where empty), best first."""


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
    """Return a ranking in which every place is empty."""
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
    step = max(1, RESCORED_TOGETHER // max(1, width * embeddings.shape[1]))
    for start in range(0, len(queries), step):
        some = slice(start, start + step)
        vectors, positions = queries[some], _padded(candidates[some], len(embeddings))
        if positions.shape[1] > k + MARGIN:
            rough = np.matmul(_vectors(embeddings, positions), vectors[:, :, None])[..., 0]
            best = _best(np.where(positions < len(embeddings), rough, -np.inf), k + MARGIN)
            positions = np.sort(np.take_along_axis(positions, best, axis=1), axis=1)
        wide = _vectors(embeddings, positions).astype(np.float64) * vectors.astype(np.float64)[:, None]
        exact = np.where(positions < len(embeddings), wide.sum(-1), -np.inf)
        best = _best(exact, k)
        exact, positions = (np.take_along_axis(part, best, axis=1) for part in (exact, positions))
        ids[some, : best.shape[1]] = np.where(positions < len(embeddings), positions, NO_PASSAGE)
        scores[some, : best.shape[1]] = exact
    return ids, scores


def _padded(candidates: Sequence[Int[np.ndarray, "C"]], end: int) -> Int[np.ndarray, "Q C"]:
    """Return each query's candidates in ascending order, padded with `end`."""
    positions = np.full((len(candidates), max(map(len, candidates))), end, np.int64)
    for row, some in zip(positions, candidates):
        row[: len(some)] = some
    return np.sort(positions, axis=1)


def _vectors(
    embeddings: Float[np.ndarray, "N E"], positions: Int[np.ndarray, "Q C"]
) -> Float[np.ndarray, "Q C E"]:
    return embeddings[np.minimum(positions, len(embeddings) - 1)]


def _best(scores: Float[np.ndarray, "Q C"], k: int) -> Int[np.ndarray, "Q k"]:
    """Apply `top_k` to every row."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def overlap(found: Int[np.ndarray, "Q k"], expected: Int[np.ndarray, "Q k"]) -> float:
    """Return the recall of a ranking: the mean share of the expected ids that are in `found`, in [0, 1]."""
    wanted = [set(row) - {NO_PASSAGE} for row in expected.tolist()]
    return float(
        np.mean([len(row & set(got)) / max(1, len(row)) for row, got in zip(wanted, found.tolist())])
    )
