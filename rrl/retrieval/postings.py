"""Count the postings of a corpus block by block, and make bm25s's score matrix from them.

bm25s itself holds the words of the whole corpus as Python lists while it builds. 21 million passages have a billion words.
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
"""(name, length, dtype) -> an uninitialised array, in memory or on disk."""


@dataclasses.dataclass(frozen=True)
class PostingsBlock:
    """Counts of each word in each passage of a block of consecutive passages; sorted by word, then passage.

    P is the number of different (word, passage) pairs, C the number of passages.
    """

    words: Int[np.ndarray, "P"]
    """Positions in the vocabulary."""
    passages: Int[np.ndarray, "P"]
    """Positions in the block."""
    counts: Int[np.ndarray, "P"]
    """How often the word is in the passage."""
    lengths: Int[np.ndarray, "C"]
    """Number of words of each passage."""


class Vocabulary(collections.defaultdict[str, int]):
    """Number words in the order of their first use. Looking up a new word adds it."""

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        return number


def count_words(passages: Sequence[Sequence[str]], vocabulary: Vocabulary) -> PostingsBlock:
    """Count the words of each passage; add new words to the vocabulary."""
    lengths = np.fromiter(map(len, passages), np.int64, len(passages))
    numbers = (vocabulary[word] for words in passages for word in words)
    words = np.fromiter(numbers, np.int64, lengths.sum())
    # One number per (word, passage) pair, so that one sort counts all pairs.
    pair_ids = words * len(passages) + np.repeat(np.arange(len(passages)), lengths)
    pairs, counts = np.unique(pair_ids, return_counts=True)
    words, rows = np.divmod(pairs, max(1, len(passages)))
    parts = (part.astype(np.int32) for part in (words, rows, counts, lengths))
    return PostingsBlock(*parts)


def inverse_frequencies(frequencies: Int[np.ndarray, "W"], passages: int, idf: str) -> Float[np.ndarray, "W"]:
    """Return the inverse document frequency of each word, float32.

    Of the N `passages`, n contain the word (its document frequency, in `frequencies`).

    lucene: log(1 + (N - n + 0.5) / (n + 0.5)). okapi, as in rank_bm25's BM25Okapi: log((N - n + 0.5) / (n + 0.5)); a word in more
    than half of the passages would have a negative weight, and gets a quarter of the mean weight instead.
    """
    odds = (passages - frequencies + 0.5) / (frequencies + 0.5)
    if idf == "lucene":
        # Round where bm25s rounds, so that the scores are bitwise equal to its scores.
        return np.log(1 + odds).astype(np.float32)
    weights = np.log(odds)
    return np.where(weights < 0, weights.mean() / 4, weights).astype(np.float32)


def score_matrix(
    blocks: Callable[[], Iterable[PostingsBlock]],
    vocabulary_size: int,
    k1: float,
    b: float,
    allocate: Allocate,
    idf: str = "lucene",
) -> tuple[Float[np.ndarray, "P"], Int[np.ndarray, "P"], Int[np.ndarray, "W1"]]:
    """Compute the BM25 score of each word in each passage, as a sparse matrix with a column per word (CSC).

    The formula is Lucene's with exact lengths ("Lucene (accurate)" in Kamphuis et al. 2020) and the given `idf`. W1 is the number
    of words plus 1.

    Args:
      blocks: returns an iterator over all blocks; called twice.
      vocabulary_size: number of words, W.
      k1: saturation of repeated words (`Bm25Config.k1`).
      b: strength of length normalisation (`Bm25Config.b`).
      allocate: makes the three arrays, in memory or on disk.
      idf: see `inverse_frequencies`.

    Returns scores float32, positions of passages int32 (ascending within a word), and `indptr` int64: the scores of
    word w are those from indptr[w] to indptr[w + 1].
    """
    frequencies = np.zeros(vocabulary_size, np.int64)
    passages = total_length = 0
    for block in blocks():
        frequencies += np.bincount(block.words, minlength=vocabulary_size)
        passages += len(block.lengths)
        total_length += int(block.lengths.sum())
    weights = inverse_frequencies(frequencies, passages, idf)
    indptr = allocate("indptr", vocabulary_size + 1, np.int64)
    indptr[0] = 0
    np.cumsum(frequencies, out=indptr[1:])
    scores, positions = (
        allocate("data", int(indptr[-1]), np.float32),
        allocate("indices", int(indptr[-1]), np.int32),
    )
    # next_place[w]: where the next score of word w goes. first_passage: position of the block's first passage in the corpus.
    next_place, first_passage = indptr[:-1].copy(), 0
    for block in blocks():
        norms = k1 * (1 - b + b * block.lengths / (total_length / passages))
        block_words, starts, sizes = np.unique(block.words, return_index=True, return_counts=True)
        places = np.repeat(next_place[block_words] - starts, sizes) + np.arange(len(block.words))
        scores[places] = weights[block.words] * (block.counts / (norms[block.passages] + block.counts))
        positions[places] = block.passages + first_passage
        next_place[block_words] += sizes
        first_passage += len(block.lengths)
    return scores, positions, indptr


class PostingsFolder:
    """Blocks on disk, each with the words that are new in it, so that a killed count can be continued."""

    def __init__(self, folder: Path):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.vocabulary = Vocabulary()
        self.passages_counted = 0
        """Number of passages counted so far."""
        for file in self._files():
            with np.load(file) as block:
                for word in json.loads(block["new"].tobytes()):
                    self.vocabulary[word]  # a look-up adds a new word
                self.passages_counted += len(block["lengths"])

    def add(self, passages: Sequence[Sequence[str]]) -> None:
        """Count the next passages and write their block."""
        known = len(self.vocabulary)
        block = count_words(passages, self.vocabulary)
        new = json.dumps(list(self.vocabulary)[known:]).encode()
        file = self.folder / f"{len(self._files()):06d}.npz"
        with atomic_stream(file) as stream:
            np.savez(stream, new=np.frombuffer(new, np.uint8), **vars(block))
        self.passages_counted += len(passages)

    def blocks(self) -> Iterator[PostingsBlock]:
        """Yield all blocks in order."""
        for file in self._files():
            with np.load(file) as block:
                yield PostingsBlock(*(block[field.name] for field in dataclasses.fields(PostingsBlock)))

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.npz"))
