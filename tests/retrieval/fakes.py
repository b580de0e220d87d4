"""An encoder without a model: words hashed to fixed random directions."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rrl.data.passages import Passage
from rrl.retrieval.encode import OnBatch

DIM = 32


@dataclasses.dataclass(frozen=True)
class WordEncoder:
    """Stands in for a `TextEncoder`, in NumPy. The vector of a text is the sum of its words' vectors."""

    name: str = "words"
    fingerprint: str = "f" * 64
    dim: int = DIM
    titles: bool = True
    encoder: Any = None

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors [Q, E]; zero for a text without words."""
        rows = np.zeros((len(texts), DIM), np.float32)
        for row, text in zip(rows, texts):
            for word in text.lower().split():
                row += np.random.default_rng(zlib.crc32(word.encode("utf-8", "replace"))).normal(size=DIM)
        return (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)).astype(np.float32)

    def embed_queries(self, queries: Sequence[str]) -> np.ndarray:
        """As `TextEncoder.embed_queries`."""
        return self.embed(queries)

    def embed_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """As `TextEncoder.embed_passages`."""
        return self.embed(self.tokenize_passages(passages)[0])

    def tokenize_passages(self, passages: Sequence[Passage]) -> tuple[list[str], int]:
        """As `TextEncoder.tokenize_passages`; texts of more than 50 words count as cut."""
        texts = [f"{passage.title} {passage.text}" if self.titles else passage.text for passage in passages]
        return texts, sum(len(text.split()) > 50 for text in texts)

    batch = 4

    def embed_tokens(
        self, texts: Sequence[str], batch: int | None = None, on_batch: OnBatch = lambda *_: None
    ) -> np.ndarray:
        """As `TextEncoder.embed_tokens`, the last texts first."""
        vectors = self.embed(texts)
        for end in range(len(texts), 0, -self.batch):
            rows = np.arange(max(0, end - self.batch), end)
            on_batch(rows, vectors[rows])
        return vectors
