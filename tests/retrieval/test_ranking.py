"""Rankings are ordered by score, then position, independent of the rest of the batch."""

from typing import Any

import numpy as np
import pytest

from rrl.retrieval import ranking
from rrl.retrieval.ranking import NO_PASSAGE, rescore, top_k


@pytest.mark.parametrize("seed", range(20))
def test_top_k_agrees_with_a_full_stable_sort(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 6, rng.integers(1, 40)).astype(np.float32)
    for k in (1, 3, len(scores), len(scores) + 5):
        expected = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
        assert top_k(scores, k).tolist() == expected


def test_rescoring_pads_and_breaks_ties_by_position() -> None:
    embeddings = np.float32([[1, 0], [0, 1], [1, 0], [0.5, 0]])
    ids, scores = rescore(
        embeddings, np.float32([[1, 0], [0, 1]]), [np.array([3, 2, 0]), np.array([], int)], 4
    )
    assert ids.tolist() == [[0, 2, 3, NO_PASSAGE], [NO_PASSAGE] * 4]
    assert scores[0].tolist() == [1, 1, 0.5, -np.inf]


def test_rescoring_bounds_the_vectors_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(np.ndarray):
        most = 0

        def __getitem__(self, index: Any) -> Any:
            found = np.asarray(super().__getitem__(index))
            Watched.most = max(Watched.most, found.size)
            return found

    rng = np.random.default_rng(1)
    embeddings, queries = (rng.normal(size=(n, 8)).astype(np.float32) for n in (300, 40))
    candidates = [rng.permutation(300)[: 50 + row] for row in range(40)]
    whole = rescore(embeddings, queries, candidates, 5)
    for limit in (8, 2_000):
        monkeypatch.setattr(ranking, "MAX_RESCORE_ELEMENTS", limit)
        Watched.most = 0
        for part, expected in zip(
            rescore(embeddings.view(Watched), queries, candidates, 5), whole, strict=True
        ):
            np.testing.assert_array_equal(part, expected)
        assert Watched.most <= max(limit, 89 * 8)
    scores = embeddings.astype(np.float64) @ queries[7].astype(np.float64)
    assert whole[0][7].tolist() == sorted(candidates[7].tolist(), key=lambda i: -scores[i])[:5]


def test_rescoring_a_query_is_bitwise_equal_in_any_batch() -> None:
    rng = np.random.default_rng(0)
    embeddings, queries = (
        rng.normal(size=(500, 64)).astype(np.float32),
        rng.normal(size=(33, 64)).astype(np.float32),
    )
    everything = [np.arange(500)] * len(queries)
    ids, scores = rescore(embeddings, queries, everything, 10)
    for row in (0, 17, 32):
        alone = rescore(embeddings, queries[row : row + 1], everything[:1], 10)
        assert (alone[0] == ids[row]).all()
        assert (alone[1] == scores[row]).all()
