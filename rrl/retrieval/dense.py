"""Indexes over embeddings: exact inner products in NumPy, and ScaNN."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from rrl.retrieval.ranking import Ranking, rescore, top_k

MARGIN = 8
"""Candidates beyond k that are rescored, so that float32 rounding at the edge cannot lose a passage."""

CHUNK = 65_536
"""Passages scored at a time by exact search: bounds its memory."""


class ExactIndex:
    """Inner products with every passage: the reference, and right for small corpora."""

    kind = "exact"
    needs_embeddings = True

    def __init__(self, embeddings: Float[np.ndarray, "N E"]):
        self.embeddings = embeddings

    def search(self, queries: Sequence[str], k: int, embeddings: Float[np.ndarray, "Q E"]) -> Ranking:
        """Rank all passages by inner product with each query's embedding."""
        wanted = k + MARGIN
        best: list[list[np.ndarray]] = [[] for _ in range(len(embeddings))]
        scores: list[list[np.ndarray]] = [[] for _ in range(len(embeddings))]
        for start in range(0, len(self.embeddings), CHUNK):
            block = embeddings @ self.embeddings[start : start + CHUNK].T
            for row, values in enumerate(block):
                found = top_k(values, wanted)
                best[row].append(found + start)
                scores[row].append(values[found])
        candidates = [np.concatenate(b)[top_k(np.concatenate(s), wanted)] for b, s in zip(best, scores)]
        return rescore(self.embeddings, embeddings, candidates, k)


@dataclasses.dataclass(frozen=True)
class ScannConfig:
    """Settings of a ScaNN index; `for_corpus` chooses them from the number of passages."""

    leaves: int
    """Partitions of the tree; 0: no tree, every passage is scored."""
    leaves_to_search: int
    reorder: int
    """Candidates whose quantised scores are replaced by exact ones."""

    @classmethod
    def for_corpus(cls, passages: int) -> "ScannConfig":
        """Brute force below 20,000 passages, where it is as fast and exact; else a tree of about sqrt(n) leaves."""
        if passages < 20_000:
            return cls(leaves=0, leaves_to_search=0, reorder=0)
        leaves = round(math.sqrt(passages))
        return cls(leaves=leaves, leaves_to_search=max(10, leaves // 10), reorder=200)


class ScannIndex:
    """ScaNN: brute force for small corpora, tree + quantised scores + exact rescoring for large ones."""

    kind = "scann"
    needs_embeddings = True

    def __init__(self, embeddings: Float[np.ndarray, "N E"], searcher: Any, config: ScannConfig):
        self.embeddings = embeddings
        self.config = config
        self._searcher = searcher

    @classmethod
    def build(cls, embeddings: Float[np.ndarray, "N E"], config: ScannConfig | None = None) -> "ScannIndex":
        """Build over unit vectors, compared by inner product."""
        config = config or ScannConfig.for_corpus(len(embeddings))
        builder = _scann().builder(np.asarray(embeddings), 10, "dot_product")
        if not config.leaves:
            return cls(embeddings, builder.score_brute_force().build(), config)
        builder = builder.tree(
            num_leaves=config.leaves,
            num_leaves_to_search=config.leaves_to_search,
            training_sample_size=min(len(embeddings), 250_000),
        ).score_ah(2, anisotropic_quantization_threshold=0.2)
        return cls(embeddings, builder.reorder(config.reorder).build(), config)

    def save(self, folder: Path) -> None:
        """Write the searcher with paths relative to the folder, so that it can be moved."""
        folder.mkdir()
        if self.config.leaves:
            self._searcher.serialize(str(folder), relative_path=True)

    @classmethod
    def load(cls, folder: Path, embeddings: Float[np.ndarray, "N E"], config: ScannConfig) -> "ScannIndex":
        """Open what `save` wrote; brute force is rebuilt from the embeddings, which takes no time."""
        if not config.leaves:
            return cls.build(embeddings, config)
        return cls(embeddings, _scann().load_searcher(str(folder)), config)

    def search(self, queries: Sequence[str], k: int, embeddings: Float[np.ndarray, "Q E"]) -> Ranking:
        """Approximate candidates from ScaNN, ranked by exact inner products."""
        count = len(self.embeddings)
        wanted = min(k + MARGIN, count)
        found, _ = self._searcher.search_batched(
            np.ascontiguousarray(embeddings, np.float32),
            final_num_neighbors=wanted,
            pre_reorder_num_neighbors=max(wanted, self.config.reorder) if self.config.leaves else None,
        )
        # ScaNN's ids are uint32; a place it could not fill is an id out of range.
        candidates = [ids[ids < count] for ids in np.asarray(found).astype(np.int64)]
        return rescore(self.embeddings, embeddings, candidates, k)


def _scann() -> Any:
    """`scann.scann_ops_pybind`, imported without the TensorFlow part that we never use.

    ScaNN imports TensorFlow if it is there, and fails beside one it was not built against.
    """
    absent = object()
    held: Any = sys.modules.get("tensorflow", absent)
    sys.modules["tensorflow"] = None  # type: ignore[assignment]
    try:
        from scann import scann_ops_pybind
    finally:
        if held is absent:
            del sys.modules["tensorflow"]
        else:
            sys.modules["tensorflow"] = held
    return scann_ops_pybind
