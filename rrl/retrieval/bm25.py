"""BM25 over words (bm25s), with Lucene's English analysis and a weight for titles."""

import dataclasses
import json
import logging
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rrl.data.passages import Passage
from rrl.errors import UserError, at_least
from rrl.retrieval.ranking import Ranking, empty_ranking, top_k

# fmt: off
STOP_WORDS = frozenset((
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not", "of",
    "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "will", "with",
))
# fmt: on
"""Lucene's English stop words."""

_APOSTROPHES = str.maketrans("’‘`", "'''")
_WORD = re.compile(r"\w+(?:'\w+)*")
_LOCAL = threading.local()


@dataclasses.dataclass(frozen=True)
class Bm25Config:
    """Settings of a BM25 index; the defaults are those of Pyserini and BEIR."""

    k1: float = 0.9
    """Saturation of repeated words."""
    b: float = 0.4
    """Strength of length normalisation."""
    title_weight: int = 1
    """How often the title counts; 3 in the built-in world, where names are made of shared words."""

    def __post_init__(self) -> None:
        at_least(0, self, "k1", "title_weight")
        if not 0 <= self.b <= 1:
            raise UserError(f"b={self.b} must lie in 0..1")


class Bm25Index:
    """An inverted index with precomputed scores; safe to search from many threads."""

    kind = "bm25"
    needs_embeddings = False

    def __init__(self, model: Any, config: Bm25Config):
        self.config = config
        self._vocabulary: dict[str, int] = model.vocab_dict
        self._model = model

    @classmethod
    def build(cls, passages: Sequence[Passage], config: Bm25Config | None = None) -> "Bm25Index":
        """Index title + text of each passage, the title repeated `title_weight` times.

        Raises UserError if there is no word in the whole corpus.
        """
        bm25s = _bm25s()
        config = config or Bm25Config()
        model = bm25s.BM25(k1=config.k1, b=config.b)
        words = [analyse(passage.title) * config.title_weight + analyse(passage.text) for passage in passages]
        if not any(words):
            raise UserError("corpus: no passage holds a word that BM25 could index. Check the corpus file.")
        model.index(words, create_empty_token=False, show_progress=False)
        return cls(model, config)

    def save(self, folder: Path) -> None:
        """Write the index under `folder`."""
        self._model.save(str(folder), show_progress=False)
        (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(self.config)))

    @classmethod
    def load(cls, folder: Path) -> "Bm25Index":
        """Open what `save` wrote, memory-mapped."""
        bm25s = _bm25s()
        model = bm25s.BM25.load(str(folder), mmap=True, show_progress=False)
        return cls(model, Bm25Config(**json.loads((folder / "settings.json").read_text())))

    def search(self, queries: Sequence[str], k: int, embeddings: None = None) -> Ranking:
        """Rank the passages that share a word with the query; others are not returned."""
        ids, scores = empty_ranking(len(queries), k)
        for row, query in enumerate(queries):
            words = [self._vocabulary[word] for word in analyse(query) if word in self._vocabulary]
            if not words:
                continue
            found = self._model.get_scores_from_ids(words)
            best = top_k(found, k)
            best = best[found[best] > 0]
            ids[row, : len(best)] = best
            scores[row, : len(best)] = found[best]
        return ids, scores


def _bm25s() -> Any:
    # Importing it runs a JAX operation, which must not come before a launcher has set the host up.
    import bm25s

    # It logs every build, whatever the level of the root logger.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def analyse(text: str) -> list[str]:
    """Words as Lucene's EnglishAnalyzer has them: lower case, no possessive, no stop words, Porter2 stems."""
    words = (word.removesuffix("'s") for word in _WORD.findall(text.lower().translate(_APOSTROPHES)))
    return _stemmer().stemWords([word for word in words if word not in STOP_WORDS])


def _stemmer() -> Any:
    # A PyStemmer object is not thread-safe (it holds a cache), so each thread has its own.
    stemmer = getattr(_LOCAL, "stemmer", None)
    if stemmer is None:
        import Stemmer

        stemmer = _LOCAL.stemmer = Stemmer.Stemmer("english")
    return stemmer
