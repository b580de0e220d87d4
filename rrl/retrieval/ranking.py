"""Top-k with one order everywhere: higher score first, then the earlier passage."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

MARGIN = 8
"""Candidates beyond k that are rescored, so that float32 rounding at the edge cannot lose a passage."""

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
    """Rank each query's candidates by inner products in float64, one query at a time.

    A matrix product's last bits depend on the batch it is computed in; these do not, so a query's ranking is the
    same whoever else asks at the same time.
    """
    ids, scores = empty_ranking(len(queries), k)
    for row, (query, found) in enumerate(zip(queries, candidates)):
        found = np.sort(found)
        if len(found) > k + MARGIN:
            # Most of many candidates are told apart by float32, at a fraction of the time.
            found = np.sort(found[top_k(embeddings[found] @ query, k + MARGIN)])
        exact = (embeddings[found].astype(np.float64) * query.astype(np.float64)).sum(-1)
        best = top_k(exact, k)
        ids[row, : len(best)] = found[best]
        scores[row, : len(best)] = exact[best]
    return ids, scores


def overlap(found: Int[np.ndarray, "Q k"], expected: Int[np.ndarray, "Q k"]) -> float:
    """Recall of a ranking: the mean share of the expected ids that were found, in [0, 1]."""
    wanted = [set(row) - {NOTHING} for row in expected.tolist()]
    return float(
        np.mean([len(row & set(got)) / max(1, len(row)) for row, got in zip(wanted, found.tolist())])
    )
