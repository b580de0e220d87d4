"""Postings of a corpus, counted block by block, and bm25s's matrix of scores made from them.

bm25s holds the words of the whole corpus as Python lists while it builds; 21 million passages have a billion of them.
"""

import collections
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from rrl.files import atomic_stream

Allocate = Callable[[str, int, type], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Block:
    """How often each word occurs in each passage of a run of passages; sorted by word, then passage."""

    words: Int[np.ndarray, "P"]
    passages: Int[np.ndarray, "P"]
    """Positions in the run."""
    counts: Int[np.ndarray, "P"]
    lengths: Int[np.ndarray, "C"]
    """Words of each passage."""


class Vocabulary(collections.defaultdict[str, int]):
    """Numbers words in the order of their first use."""

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        return number


def count(passages: Sequence[Sequence[str]], vocabulary: Vocabulary) -> Block:
    """Counts the words of each passage; new ones enter the vocabulary."""
    lengths = np.fromiter(map(len, passages), np.int64, len(passages))
    numbers = (vocabulary[word] for words in passages for word in words)
    words = np.fromiter(numbers, np.int64, lengths.sum())
    keys = words * len(passages) + np.repeat(np.arange(len(passages)), lengths)
    found, counts = np.unique(keys, return_counts=True)
    words, rows = np.divmod(found, max(1, len(passages)))
    parts = (part.astype(np.int32) for part in (words, rows, counts, lengths))
    return Block(*parts)


def inverse_frequencies(frequencies: Int[np.ndarray, "W"], passages: int, idf: str) -> Float[np.ndarray, "W"]:
    """The weight of each word, float32, by the number of passages that have it.

    lucene: log(1 + (N - n + 0.5) / (n + 0.5)). okapi: log((N - n + 0.5) / (n + 0.5)), as in rank_bm25's BM25Okapi, where a word
    of a negative weight, which is in more than half of the passages, has a quarter of the mean weight.
    """
    odds = (passages - frequencies + 0.5) / (frequencies + 0.5)
    if idf == "lucene":
        # Rounded where bm25s rounds, so that the scores are its own to the last bit.
        return np.log(1 + odds).astype(np.float32)
    weights = np.log(odds)
    return np.where(weights < 0, weights.mean() / 4, weights).astype(np.float32)


def score_matrix(
    blocks: Callable[[], Iterable[Block]],
    words: int,
    k1: float,
    b: float,
    allocate: Allocate,
    idf: str = "lucene",
) -> tuple[Float[np.ndarray, "P"], Int[np.ndarray, "P"], Int[np.ndarray, "W1"]]:
    """BM25 of each word in each passage, by columns (words): Lucene's (Kamphuis et al. 2020, row 2) but for another `idf`.

    Args:
      blocks: gives the blocks from the first; asked twice.
      words: size of the vocabulary.
      k1: see `Bm25Config`; so is b.
      allocate: makes an array of (name, length, dtype), on disk if it likes.
      idf: see `inverse_frequencies`.

    Returns scores float32, positions of passages int32 (ascending within a word), and the border of each word.
    """
    frequencies = np.zeros(words, np.int64)
    passages = length = 0
    for block in blocks():
        frequencies += np.bincount(block.words, minlength=words)
        passages += len(block.lengths)
        length += int(block.lengths.sum())
    weights = inverse_frequencies(frequencies, passages, idf)
    borders = allocate("indptr", words + 1, np.int64)
    borders[0] = 0
    np.cumsum(frequencies, out=borders[1:])
    scores, positions = (
        allocate("data", int(borders[-1]), np.float32),
        allocate("indices", int(borders[-1]), np.int32),
    )
    ends, first = borders[:-1].copy(), 0
    for block in blocks():
        norms = k1 * (1 - b + b * block.lengths / (length / passages))
        held, begins, sizes = np.unique(block.words, return_index=True, return_counts=True)
        places = np.repeat(ends[held] - begins, sizes) + np.arange(len(block.words))
        scores[places] = weights[block.words] * (block.counts / (norms[block.passages] + block.counts))
        positions[places] = block.passages + first
        ends[held] += sizes
        first += len(block.lengths)
    return scores, positions, borders


class BlockFolder:
    """Blocks on disk, each with the words that are new in it, so that counting continues where it was broken off."""

    def __init__(self, folder: Path):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.vocabulary = Vocabulary()
        self.passages = 0
        """How many are counted."""
        for file in self._files():
            with np.load(file) as held:
                for word in json.loads(held["new"].tobytes()):
                    self.vocabulary[word]
                self.passages += len(held["lengths"])

    def add(self, passages: Sequence[Sequence[str]]) -> None:
        """Counts the next passages and writes them."""
        known = len(self.vocabulary)
        block = count(passages, self.vocabulary)
        new = json.dumps(list(self.vocabulary)[known:]).encode()
        file = self.folder / f"{len(self._files()):06d}.npz"
        with atomic_stream(file) as stream:
            np.savez(stream, new=np.frombuffer(new, np.uint8), **vars(block))
        self.passages += len(passages)

    def __call__(self) -> Iterator[Block]:
        """The blocks, from the first."""
        for file in self._files():
            with np.load(file) as held:
                yield Block(*(held[field.name] for field in dataclasses.fields(Block)))

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.npz"))
