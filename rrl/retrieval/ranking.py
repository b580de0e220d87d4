"""Top-k with one order everywhere: higher score first, then the earlier passage."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

MARGIN = 8
"""Candidates beyond k that are rescored, so that float32 rounding at the edge cannot lose a passage."""

RESCORED_TOGETHER = 16 << 20
"""Numbers of candidates' vectors that are read at once, those of one query at least: bounds the memory."""

NOTHING = -1
"""Id of an empty place in a ranking, where fewer than k passages were found."""

Ranking = tuple[Int[np.ndarray, "Q k"], Float[np.ndarray, "Q k"]]
"""Ids (int64, `NOTHING` where empty) and scores (float32, -inf where empty), best first."""


def top_k(scores: Float[np.ndarray, "N"], k: int) -> Int[np.ndarray, "k"]:
    """Positions of the k highest scores, ties by position, so that rankings do not depend on the partition."""
    count = scores.shape[0]
    k = min(k, count)
    if k < count:
        threshold = np.partition(scores, count - k)[count - k]
        # Everything tied with the k-th score stays in, or the partition would choose among the ties.
        candidates = np.flatnonzero(scores >= threshold)
    else:
        candidates = np.arange(count)
    order = np.argsort(-scores[candidates], kind="stable")
    return candidates[order[:k]]


def empty_ranking(queries: int, k: int) -> Ranking:
    """A ranking with nothing in it yet."""
    return np.full((queries, k), NOTHING, np.int64), np.full((queries, k), -np.inf, np.float32)


def rescore(
    embeddings: Float[np.ndarray, "N E"],
    queries: Float[np.ndarray, "Q E"],
    candidates: Sequence[Int[np.ndarray, "C"]],
    k: int,
) -> Ranking:
    """Rank each query's candidates by inner products in float64, each summed for itself.

    A matrix product's last bits depend on the batch it is computed in; these do not, so a query's ranking is the
    same whoever else asks at the same time. Most of many candidates are told apart by float32, at a fraction of the time.
    """
    ids, scores = empty_ranking(len(queries), k)
    most = max(map(len, candidates), default=0)
    step = max(1, RESCORED_TOGETHER // max(1, most * embeddings.shape[1]))
    for start in range(0, len(queries), step):
        some = slice(start, start + step)
        asked, found = queries[some], _padded(candidates[some], len(embeddings))
        if found.shape[1] > k + MARGIN:
            rough = np.matmul(_vectors(embeddings, found), asked[:, :, None])[..., 0]
            best = _best(np.where(found < len(embeddings), rough, -np.inf), k + MARGIN)
            found = np.sort(np.take_along_axis(found, best, axis=1), axis=1)
        wide = _vectors(embeddings, found).astype(np.float64) * asked.astype(np.float64)[:, None]
        exact = np.where(found < len(embeddings), wide.sum(-1), -np.inf)
        best = _best(exact, k)
        exact, found = (np.take_along_axis(part, best, axis=1) for part in (exact, found))
        ids[some, : best.shape[1]] = np.where(found < len(embeddings), found, NOTHING)
        scores[some, : best.shape[1]] = exact
    return ids, scores


def _padded(candidates: Sequence[Int[np.ndarray, "C"]], end: int) -> Int[np.ndarray, "Q C"]:
    """Each query's candidates in order, with `end` after them where others have more."""
    found = np.full((len(candidates), max(map(len, candidates))), end, np.int64)
    for row, some in zip(found, candidates):
        row[: len(some)] = some
    return np.sort(found, axis=1)


def _vectors(
    embeddings: Float[np.ndarray, "N E"], found: Int[np.ndarray, "Q C"]
) -> Float[np.ndarray, "Q C E"]:
    return embeddings[np.minimum(found, len(embeddings) - 1)]


def _best(scores: Float[np.ndarray, "Q C"], k: int) -> Int[np.ndarray, "Q k"]:
    """As `top_k`, of every row."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def overlap(found: Int[np.ndarray, "Q k"], expected: Int[np.ndarray, "Q k"]) -> float:
    """Recall of a ranking: the mean share of the expected ids that were found, in [0, 1]."""
    wanted = [set(row) - {NOTHING} for row in expected.tolist()]
    return float(
        np.mean([len(row & set(got)) / max(1, len(row)) for row, got in zip(wanted, found.tolist())])
    )
