"""BM25 over words (bm25s), with Lucene's English analysis and a weight for titles."""

import dataclasses
import json
import logging
import os
import re
import shutil
import threading
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import regex

from rrl.data.passages import Passage
from rrl.errors import UserError, at_least, one_of
from rrl.retrieval.disk_space import detect_disk_full
from rrl.retrieval.postings import (
    Allocate,
    PostingsBlock,
    PostingsFolder,
    Vocabulary,
    count_words,
    score_matrix,
)
from rrl.retrieval.ranking import Ranking, empty_ranking, top_k

# fmt: off
STOP_WORDS = frozenset((
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not", "of",
    "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "will", "with",
))
# fmt: on
"""Lucene's English stop words."""

ANALYSIS_VERSION = 3
"""Version of `analyse`, saved with an index. Version 1 matched `\\w+` without Unicode normalization; version 2 split Thai, Lao,
Khmer and Burmese into characters."""

WORD = regex.compile(
    r"(?:(?=[\p{L}\p{M}])[\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}])+|\b(?=_*[^\W_])\S+?\b", regex.WORD
)
"""Text between two word boundaries of UAX #29 that has a letter or a digit. Scripts whose words UAX #29 leaves to a
dictionary (Thai, Lao, Khmer, Burmese) stay together in runs, as in Lucene's StandardTokenizer."""
_ASCII_WORD = re.compile(
    r"_*[a-z0-9]\w*(?:(?:(?<=[a-z])[.:'](?=[a-z])|(?<=[0-9])[.,;'](?=[0-9]))\w+)*", re.ASCII
)
"""Matches what `WORD` matches in lower-case ASCII, in half the time (rules WB6, WB7, WB11, WB12)."""
_CHARACTER_MAP = str.maketrans("’‘`", "'''", "\u00ad\ufeff")
"""Maps all apostrophes to one; removes soft hyphens and byte order marks."""
_ALPHANUMERIC = re.compile(r"\w+")
"""Matches a run of letters, digits and underscores: a word of the tokenizer `words`."""
TOKENIZERS = ("lucene", "whitespace", "words")
"""Allowed values of `Bm25Config.tokens`."""
IDFS = ("lucene", "okapi")
"""Allowed values of `Bm25Config.idf`."""
_LOCAL = threading.local()


@dataclasses.dataclass(frozen=True)
class Bm25Config:
    """Settings of a BM25 index; the defaults are those of Pyserini and BEIR."""

    k1: float = 0.9
    """Saturation of repeated words: the higher, the more a repetition adds."""
    b: float = 0.4
    """Strength of length normalisation."""
    title_weight: int = 1
    """How many times the title is counted. 0 indexes the text alone. Miniwiki, the generated corpus of rrl, uses 3, because its
    names share words."""
    stem: bool = True
    """Whether to reduce words to their stems (Porter2)."""
    tokens: str = "lucene"
    """How text is split. lucene: by `analyse`. whitespace: at white space. words: into runs of letters, digits and underscores.
    The last two only lower the case; they keep stop words and do not stem. Published results with rank_bm25 often use one of
    them."""
    idf: str = "lucene"
    """Weight of rare words: `lucene`, or `okapi` as in rank_bm25's BM25Okapi (see `inverse_frequencies`)."""

    def __post_init__(self) -> None:
        one_of(TOKENIZERS, self, "tokens")
        one_of(IDFS, self, "idf")
        at_least(0, self, "k1", "title_weight")
        if not 0 <= self.b <= 1:
            raise UserError(f"b={self.b} must lie in 0..1")

    def analyse_passage(self, passage: Passage) -> list[str]:
        """Return the tokens of a passage: its title `title_weight` times, then its text."""
        return self.analyse(passage.title) * self.title_weight + self.analyse(passage.text)

    def analyse(self, text: str) -> list[str]:
        """Return the tokens of a text or query."""
        if self.tokens == "whitespace":
            return text.lower().split()
        if self.tokens == "words":
            return _ALPHANUMERIC.findall(text.lower())
        return analyse(text, self.stem)


PUBLISHED_K1_B = {
    "pyserini": (0.9, 0.4),
    "msmarco": (0.82, 0.68),
    "lucene": (1.2, 0.75),
    "bm25s": (1.5, 0.75),
}
"""(k1, b) by name. pyserini: default of Pyserini and BEIR. msmarco: Pyserini's for MS MARCO passages. lucene: default of
Lucene and Elasticsearch. bm25s: default of bm25s and rank_bm25."""


class Bm25Index:
    """An inverted index with precomputed scores. Searching is thread-safe."""

    kind = "bm25"
    needs_embeddings = False

    def __init__(self, model: Any, config: Bm25Config):
        """Wrap `model`, a `bm25s.BM25` that holds the scores."""
        self.config = config
        self._vocabulary: dict[str, int] = model.vocab_dict
        self._model = model

    @classmethod
    def build(cls, passages: Iterable[Passage], config: Bm25Config | None = None) -> "Bm25Index":
        """Index passages in memory. Raises UserError if the corpus has no word to index."""
        config = config or Bm25Config()
        vocabulary = Vocabulary()
        block = count_words([config.analyse_passage(passage) for passage in passages], vocabulary)
        return cls(
            _bm25s_model(lambda: [block], vocabulary, config, lambda _, n, dtype: np.empty(n, dtype)), config
        )

    @classmethod
    def build_folder(cls, postings: PostingsFolder, folder: Path, config: Bm25Config) -> None:
        """Write the files that `load` opens, from the word counts in `postings`. All large arrays are memory-mapped."""
        matrix_folder = postings.folder / "matrix"
        shutil.rmtree(matrix_folder, ignore_errors=True)
        matrix_folder.mkdir()

        def allocate(name: str, length: int, dtype: type) -> np.ndarray:
            # An empty memory map is an error, so map at least one element and slice it off.
            size = max(1, length)
            with (matrix_folder / name).open("xb") as stream:
                # Reserve disk space now: writing to a memory map on a full disk kills the process.
                os.posix_fallocate(stream.fileno(), 0, size * np.dtype(dtype).itemsize)
            return np.memmap(matrix_folder / name, dtype, "r+", shape=(size,))[:length]

        index = cls(_bm25s_model(postings.blocks, postings.vocabulary, config, allocate), config)
        matrix_bytes = sum(file.stat().st_size for file in matrix_folder.iterdir())
        folder.mkdir(exist_ok=True)
        with detect_disk_full(matrix_bytes, folder):
            index.save(folder)
        shutil.rmtree(matrix_folder)

    def save(self, folder: Path) -> None:
        """Write the index under `folder`."""
        self._model.save(str(folder), show_progress=False)
        settings = dataclasses.asdict(self.config) | {"analysis": ANALYSIS_VERSION}
        (folder / "settings.json").write_text(json.dumps(settings))

    @classmethod
    def load(cls, folder: Path) -> "Bm25Index":
        """Open a saved index, memory-mapped. Raises UserError if another version of `analyse` built it."""
        settings = json.loads((folder / "settings.json").read_text())
        if (version := settings.pop("analysis", 1)) != ANALYSIS_VERSION:
            raise UserError(
                f"index {folder}: built with version {version} of the text analysis, but queries use version "
                f"{ANALYSIS_VERSION}, so some words would never match. Build the index again."
            )
        model = _bm25s().BM25.load(str(folder), mmap=True, show_progress=False)
        return cls(model, Bm25Config(**settings))

    def search(self, queries: Sequence[str], k: int, embeddings: None = None) -> Ranking:
        """Rank the passages that share a word with the query, and leave out all others."""
        ids, scores = empty_ranking(len(queries), k)
        for row, query in enumerate(queries):
            words = [self._vocabulary[w] for w in self.config.analyse(query) if w in self._vocabulary]
            if not words:
                continue
            passage_scores = self._model.get_scores_from_ids(words)
            best = top_k(passage_scores, k)
            best = best[passage_scores[best] > 0]
            ids[row, : len(best)] = best
            scores[row, : len(best)] = passage_scores[best]
        return ids, scores


def _bm25s_model(
    blocks: Callable[[], Iterable[PostingsBlock]],
    vocabulary: Vocabulary,
    config: Bm25Config,
    allocate: Allocate,
) -> Any:
    """Return a `bm25s.BM25` with the scores of the counted passages."""
    if not vocabulary:
        raise UserError("corpus: no passage has a word that BM25 can index. Check the corpus file.")
    model = _bm25s().BM25(k1=config.k1, b=config.b)
    data, indices, indptr = score_matrix(blocks, len(vocabulary), config.k1, config.b, allocate, config.idf)
    passages = sum(len(block.lengths) for block in blocks())
    model.scores = {"data": data, "indices": indices, "indptr": indptr, "num_docs": passages}
    model.vocab_dict, model.nonoccurrence_array = dict(vocabulary), None
    return model


def _bm25s() -> Any:
    # Importing bm25s runs a JAX operation, which must not happen before the launcher has configured JAX.
    import bm25s

    # bm25s logs every build, regardless of the root logger's level.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def analyse(text: str, stem: bool = True) -> list[str]:
    """Split text into words like Lucene's EnglishAnalyzer.

    The rules: word boundaries of UAX #29, lower case, no possessive 's, no stop words, stems. As in Lucene's StandardTokenizer,
    each Chinese or Hiragana character is a word, and runs of Katakana, Hangul, Thai, Lao, Khmer or Burmese are words.

    Unlike in Lucene:
    - the text is normalised to NFKC first, so that composed, decomposed and full-width characters are the same;
    - the stemmer is Porter2, not the original Porter stemmer;
    - emoji are dropped.
    """
    ascii_only = text.isascii()
    text = (text if ascii_only else unicodedata.normalize("NFKC", text)).lower().translate(_CHARACTER_MAP)
    # NFKC may turn other text into ASCII; the slower pattern finds the same words in it.
    matches = (_ASCII_WORD if ascii_only else WORD).findall(text)
    words = (match.removesuffix("'s") for match in matches)
    content_words = [word for word in words if word not in STOP_WORDS]
    return _stemmer().stemWords(content_words) if stem else content_words


def _stemmer() -> Any:
    # A PyStemmer object has a cache and is not thread-safe, so each thread has its own.
    stemmer = getattr(_LOCAL, "stemmer", None)
    if stemmer is None:
        import Stemmer

        stemmer = _LOCAL.stemmer = Stemmer.Stemmer("english")
    return stemmer
