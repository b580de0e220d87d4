"""Indexes over embeddings: exact inner products in NumPy, and ScaNN."""

import math
import mmap
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from rrl.retrieval.disk_space import MIN_FREE_BYTES, check_free_space, detect_disk_full
from rrl.retrieval.ranking import MARGIN, Ranking, rescore, top_k
from rrl.retrieval.sizing import ScannConfig, choose_scann, codes_bytes, training_sample

PARALLEL_QUERIES = 64
"""ScaNN uses all cores for this many queries or more."""

CHUNK = 65_536
"""Passages that exact search scores at a time, which bounds its memory."""


class ExactIndex:
    """Exact search: inner products with every passage. The reference for ScaNN, and fast enough for small corpora."""

    kind = "exact"
    needs_embeddings = True

    def __init__(self, embeddings: Float[np.ndarray, "N E"]):
        self.embeddings = embeddings

    def search(self, queries: Sequence[str], k: int, embeddings: Float[np.ndarray, "Q E"]) -> Ranking:
        """Rank all passages by inner product with each query's embedding."""
        candidate_count = k + MARGIN
        # Of each query: the best passages of each chunk, and their scores.
        best_positions: list[list[np.ndarray]] = [[] for _ in range(len(embeddings))]
        best_scores: list[list[np.ndarray]] = [[] for _ in range(len(embeddings))]
        for start in range(0, len(self.embeddings), CHUNK):
            chunk_scores = embeddings @ self.embeddings[start : start + CHUNK].T
            for query, scores in enumerate(chunk_scores):
                positions = top_k(scores, candidate_count)
                best_positions[query].append(positions + start)
                best_scores[query].append(scores[positions])
        candidates = [
            np.concatenate(positions)[top_k(np.concatenate(scores), candidate_count)]
            for positions, scores in zip(best_positions, best_scores)
        ]
        return rescore(self.embeddings, embeddings, candidates, k)


class ScannIndex:
    """ScaNN index. Small corpora: brute force. Large ones: tree, quantised scores and exact rescoring.

    A large corpus may be split into parts, each with its own tree (`ScannConfig.part`).
    """

    kind = "scann"
    needs_embeddings = True

    def __init__(self, embeddings: Float[np.ndarray, "N E"], searchers: Sequence[Any], config: ScannConfig):
        self.embeddings = embeddings
        self.config = config
        self._searchers = list(zip(config.parts(len(embeddings)), searchers, strict=True))

    @classmethod
    def build(cls, embeddings: Float[np.ndarray, "N E"], config: ScannConfig | None = None) -> "ScannIndex":
        """Build an index over embeddings, compared by inner product."""
        config = config or choose_scann(*embeddings.shape)
        parts = config.parts(len(embeddings))
        return cls(embeddings, [_build(embeddings[start:stop], config) for start, stop in parts], config)

    @classmethod
    def build_folder(
        cls, folder: Path, embeddings: Float[np.ndarray, "N E"], config: ScannConfig
    ) -> Iterator[int]:
        """Write the files that `load` opens, one part at a time; yield the number of passages indexed so far.

        Parts that exist are not built again. All paths in the files are relative, so the folder can be moved.
        """
        folder.mkdir(exist_ok=True)
        for start, stop in config.parts(len(embeddings)) if config.leaves else []:
            part = folder / f"{start:012d}"
            if not part.exists():
                unfinished = folder / "unfinished"
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                searcher = _build(embeddings[start:stop], config)
                with detect_disk_full(codes_bytes(config, stop - start, embeddings.shape[1]), folder):
                    searcher.serialize(str(unfinished), relative_path=True)
                # ScaNN does not notice when writing its last files fails.
                check_free_space(MIN_FREE_BYTES, folder)
                unfinished.rename(part)
            yield stop

    @classmethod
    def load(cls, folder: Path, embeddings: Float[np.ndarray, "N E"], config: ScannConfig) -> "ScannIndex":
        """Open the files of `build_folder`. A brute-force index is rebuilt from the embeddings, which takes no time."""
        if not config.leaves:
            return cls.build(embeddings, config)
        parts = [folder / f"{start:012d}" for start, _ in config.parts(len(embeddings))]
        _advise_random_reads(embeddings)
        return cls(embeddings, [_scann().load_searcher(str(part)) for part in parts], config)

    def search(self, queries: Sequence[str], k: int, embeddings: Float[np.ndarray, "Q E"]) -> Ranking:
        """Get approximate candidates from ScaNN and rank them by exact inner products."""
        vectors = np.ascontiguousarray(embeddings, np.float32)
        by_part = [
            self._candidates(searcher, stop - start, k, vectors)
            for (start, stop), searcher in self._searchers
        ]
        candidates = [
            np.concatenate([row + start for ((start, _), _), row in zip(self._searchers, rows)])
            for rows in zip(*by_part)
        ]
        return rescore(self.embeddings, embeddings, candidates, k)

    def _candidates(
        self, searcher: Any, count: int, k: int, vectors: np.ndarray
    ) -> list[Int[np.ndarray, "C"]]:
        """Return the candidates of each query in one part, as positions in it; `count` is the number of its passages."""
        config = self.config
        candidate_count = min(k + MARGIN, count)
        options: dict[str, Any] = {"final_num_neighbors": candidate_count}
        if config.leaves:
            options = {"final_num_neighbors": min(max(config.reorder, 2 * candidate_count), count)}
            # A large k needs enough leaves to hold `2 * candidate_count` passages.
            least_leaves = math.ceil(2 * config.leaves * candidate_count / count)
            options |= {"leaves_to_search": min(config.leaves, max(config.leaves_to_search, least_leaves))}
        search = searcher.search_batched
        if len(vectors) >= PARALLEL_QUERIES:
            search = searcher.search_batched_parallel
            options["batch_size"] = math.ceil(len(vectors) / (os.cpu_count() or 1))
        ids, distances = map(np.asarray, search(vectors, **options))
        # If ScaNN finds fewer neighbours, the other entries have id 0 and a distance that is not finite.
        return [row[filled] for row, filled in zip(ids.astype(np.int64), np.isfinite(distances))]


def _build(embeddings: Float[np.ndarray, "N E"], config: ScannConfig) -> Any:
    builder = _scann().builder(np.asarray(embeddings), 10, "dot_product")
    if not config.leaves:
        return builder.score_brute_force().build()
    tree = builder.tree(
        num_leaves=config.leaves,
        num_leaves_to_search=config.leaves_to_search,
        training_sample_size=training_sample(config, len(embeddings)),
        soar_lambda=1.5 if config.spilled else None,
        overretrieve_factor=2.0 if config.spilled else None,
    )
    return tree.score_ah(
        config.code_dims, anisotropic_quantization_threshold=0.2, training_sample_size=20_000
    ).build()


def _advise_random_reads(embeddings: Float[np.ndarray, "N E"]) -> None:
    """Tell Linux that a memory-mapped file is read one vector at a time, in random places.

    Otherwise it reads 128 KiB around each vector, and the first query from a cold disk takes half a second.
    """
    if isinstance(mapped := embeddings.base, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)


def _scann() -> Any:
    """Import `scann.scann_ops_pybind` without its TensorFlow part, which is not used here.

    ScaNN imports TensorFlow if it is installed, and fails if that version is not the one ScaNN was built for.
    """
    absent = object()
    # With None in sys.modules, `import tensorflow` raises ImportError. Restore the earlier entry afterwards.
    earlier: Any = sys.modules.get("tensorflow", absent)
    sys.modules["tensorflow"] = None  # type: ignore[assignment]
    try:
        from scann import scann_ops_pybind
    finally:
        if earlier is absent:
            del sys.modules["tensorflow"]
        else:
            sys.modules["tensorflow"] = earlier
    return scann_ops_pybind
