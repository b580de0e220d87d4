"""Measure how well retrieved passages cover the gold ones: recall, full recall, mAP, hits and MRR.

As in R2AG (Table 1) it also gives @K, the mean number of retrieved passages, and η_re, the recall per retrieved passage relative
to an oracle (`gold_efficiency`). In this module a hit is a retrieved passage that is gold.
Read `hits_by_key` first; `GoldHits` computes the metrics.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.text.metrics import score_answers
from rrl.text.normalize import RRL_RULE, AnswerRule, title_key

IDS, TITLES = "gold ids", "gold titles"
"""The two keys by which a passage is recognised as gold: its id is one of the question's gold ids, or its title is one of the
gold titles. `gold_key` chooses between them."""


@dataclasses.dataclass(frozen=True)
class GoldHits:
    """Which of the passages retrieved for each question are gold. A repeated passage counts once.

    Every metric has one value per question, NaN if the question has no gold passage.
    """

    hits: Bool[np.ndarray, "Q K"]
    """True if the passage at that rank is gold; best rank first. Ranks count distinct passages."""
    retrieved: Int[np.ndarray, "Q"]
    """Number of distinct passages retrieved for each question."""
    gold: Int[np.ndarray, "Q"]
    """Number of gold passages of each question."""

    def recall(self, k: int | None = None) -> Float[np.ndarray, "Q"]:
        """Return Recall@K: the share of the gold passages among the first k (None: all retrieved)."""
        return self._share(self.hits[:, :k].sum(1))

    def full_recall(self, k: int | None = None) -> Float[np.ndarray, "Q"]:
        """Return 1 if every gold passage is among the first k, else 0."""
        return self._nan_without_gold(self.hits[:, :k].sum(1) == self.gold)

    def average_precision(self, k: int | None = None) -> Float[np.ndarray, "Q"]:
        """Return the sum of the precision at the rank of each retrieved gold passage, over the number of gold passages.

        This is R_AP of R2AG, Eq. 5. Its mean over questions is mAP.
        """
        hits = self.hits[:, :k]
        precision = np.cumsum(hits, 1) / np.arange(1, hits.shape[1] + 1)
        return self._share((precision * hits).sum(1))

    def hit(self, k: int | None = None) -> Float[np.ndarray, "Q"]:
        """Return hits@k: 1 if any gold passage is among the first k, else 0."""
        return self._nan_without_gold(np.asarray(self.hits[:, :k].any(1)))

    def reciprocal_rank(self, k: int | None = None) -> Float[np.ndarray, "Q"]:
        """Return 1 over the rank of the first gold passage, or 0 if none is among the first k. Its mean is MRR@k."""
        hits = self.hits[:, :k]
        first = hits.argmax(1) + 1 if hits.shape[1] else np.ones(len(hits))
        return self._nan_without_gold(hits.any(1) / first)

    def metrics(self, k: int | None = None) -> dict[str, Float[np.ndarray, "Q"]]:
        """Return all metrics by name."""
        return {
            "recall": self.recall(k),
            "full_recall": self.full_recall(k),
            "map": self.average_precision(k),
            "hits": self.hit(k),
            "mrr": self.reciprocal_rank(k),
        }

    def report(self, cutoffs: Sequence[int] = ()) -> dict[str, float]:
        """Return means over the questions that have gold passages; {} if no question has any.

        The keys: recall, full_recall, map, hits and mrr, each also with "@k" for every k in `cutoffs`; "passages" (@K, the
        mean number of retrieved passages); "eta_re" (see `gold_efficiency`).

        Raises UserError if a cutoff is below 1.
        """
        if any(k < 1 for k in cutoffs):
            raise UserError(f"cutoffs={list(cutoffs)}: each must be 1 or more")
        has_gold = self.gold > 0
        if not has_gold.any():
            return {}
        report = {
            name + (f"@{k}" if k else ""): float(np.nanmean(values))
            for k in (None, *cutoffs)
            for name, values in self.metrics(k).items()
        }
        report["passages"] = float(self.retrieved[has_gold].mean())
        report["eta_re"] = gold_efficiency(
            report["recall"], report["passages"], float(self.gold[has_gold].mean())
        )
        return report

    def _share(self, amount: np.ndarray) -> Float[np.ndarray, "Q"]:
        """Return the amount per gold passage, NaN for questions without gold passages."""
        return np.where(self.gold > 0, amount / np.maximum(self.gold, 1), np.nan)

    def _nan_without_gold(self, values: np.ndarray) -> Float[np.ndarray, "Q"]:
        return np.where(self.gold > 0, values.astype(np.float64), np.nan)


def gold_key(questions: Sequence[Question], passages: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Choose the key by which passages are recognised as gold: `IDS` or `TITLES`.

    Ids are preferred, because passages may share a title. `IDS` is chosen if both hold:
    - at least as many questions have gold ids as have gold titles;
    - a passage of the corpus has the gold id of a question. If that question has gold titles and the passage's title is known,
      the title must be one of them, because ids of another corpus are often the same numbers.
    Otherwise `TITLES` is chosen, or `IDS` if no question has gold titles; a warning is returned if any question has gold ids.

    Args:
      questions: with `gold` and `gold_ids` where the data has them.
      passages: (id, title) of passages of the corpus; the title is empty if it is not known. Read up to the first match.

    Returns (`IDS` or `TITLES`, a warning or ""); ("", "") if no question has gold passages.
    """
    with_titles = sum(bool(question.gold) for question in questions)
    with_ids = sum(bool(question.gold_ids) for question in questions)
    if not with_ids or with_ids < with_titles:
        warning = (
            f"only {with_ids} questions have gold ids, {with_titles} have gold titles" if with_ids else ""
        )
        return (TITLES if with_titles else ""), warning
    titles_by_id: dict[str, set[str]] = {}
    for question in questions:
        for gold_id in question.gold_ids:
            titles_by_id.setdefault(gold_id, set()).update(map(title_key, question.gold))
    for passage_id, title in passages:
        gold_titles = titles_by_id.get(passage_id)
        if gold_titles is not None and (not gold_titles or not title or title_key(title) in gold_titles):
            return IDS, ""
    with_title = ", and a gold title of the same question" if with_titles else ""
    example = next(iter(titles_by_id))
    warning = f"no passage has one of the gold ids, such as {example!r}{with_title}: do the ids belong to this corpus?"
    return (TITLES if with_titles else IDS), warning


def gold_of(question: Question, key: str) -> tuple[str, ...]:
    """Return the gold ids of a question if `key` is `IDS`, its gold titles otherwise."""
    return question.gold_ids if key == IDS else question.gold


def hits_by_key(
    key: str,
    ids: Sequence[Sequence[str]],
    titles: Sequence[Sequence[str]],
    questions: Sequence[Question],
    repeats_take_ranks: bool = False,
) -> GoldHits:
    """Return the hits among retrieved passages, best first, by the key `IDS` or `TITLES` (see `gold_key`, `gold_hits`)."""
    gold = [gold_of(question, key) for question in questions]
    return (
        gold_hits(ids, gold, str, repeats_take_ranks)
        if key == IDS
        else gold_hits(titles, gold, title_key, repeats_take_ranks)
    )


def gold_hits(
    retrieved: Sequence[Sequence[str]],
    gold: Sequence[Sequence[str]],
    normalize: Callable[[str], str] = title_key,
    repeats_take_ranks: bool = False,
) -> GoldHits:
    """Return the hits of retrieved passages.

    Args:
      retrieved: names of the retrieved passages of each question, best first: titles or ids.
      gold: names of the gold passages of each question, of the same sort.
      normalize: two names are equal if this maps them to the same text. By default, titles match
        regardless of case and white space.
      repeats_take_ranks: whether a name that occurs again takes a rank. Set it for a single search, where a repeated title
        belongs to another passage. Do not set it for several searches, which may return the same passage.

    Raises ValueError if `retrieved` and `gold` differ in length.
    """
    gold_names = [{normalize(name) for name in names} for names in gold]
    rows = []
    for names, gold_set in zip(retrieved, gold_names, strict=True):
        keys = list(map(normalize, names))
        first_rank = {name: rank for rank, name in reversed(list(enumerate(keys)))}
        rows.append(
            [
                name in gold_set and first_rank[name] == rank
                for rank, name in enumerate(keys)
                if repeats_take_ranks or first_rank[name] == rank
            ]
        )
    return _hits(rows, [len(names) for names in gold_names])


def hits_by_answer(
    retrieved: Sequence[Sequence[str]], answers: Sequence[Sequence[str]], rule: AnswerRule = RRL_RULE
) -> GoldHits:
    """Return hits for questions without known gold passages.

    The first text that contains a gold answer (cover-EM) counts as the one gold passage. This is the retrieval
    accuracy of open-domain question answering (NQ and TriviaQA). A repeated text is one passage. `rule` normalises
    the texts before they are compared.

    Raises ValueError if `retrieved` and `answers` differ in length.
    """
    ranked = [list(dict.fromkeys(texts)) for texts in retrieved]
    pairs = [(text, gold) for texts, gold in zip(ranked, answers, strict=True) for text in texts]
    covered = iter(score_answers([text for text, _ in pairs], [gold for _, gold in pairs], rule))
    rows = []
    for texts in ranked:
        row = [next(covered).cem > 0 for _ in texts]
        first = row.index(True) if True in row else len(row)
        rows.append([rank == first for rank in range(len(row))])
    return _hits(rows, [1] * len(rows))


def hits_from_ranks(ranks: Sequence[int]) -> GoldHits:
    """Return the hits of questions with one gold passage each, from the rank of that passage.

    Ranks count from 1; rank 0 means that the gold passage was not retrieved. The number of passages after it is not known, so
    `retrieved` is the rank, and @K and η_re have no meaning.
    """
    rows = [[at == rank for at in range(1, rank + 1)] for rank in ranks]
    return _hits(rows, [1] * len(rows))


def gold_efficiency(recall: float, passages: float, gold: float) -> float:
    """Return η_re (R2AG, Table A.6): recall per retrieved passage, relative to an oracle that retrieves only the gold passages.

    `passages` is @K, the mean number of retrieved passages; `gold` is the mean number of gold passages. The value
    of the oracle is 1. The value is 0 if nothing was retrieved.
    """
    return (recall / passages) / (1.0 / gold) if passages else 0.0


def _hits(rows: Sequence[Sequence[bool]], gold: Sequence[int]) -> GoldHits:
    """Return `GoldHits` from one row of hits per question and its number of gold passages."""
    hits = np.zeros((len(rows), max(map(len, rows), default=0)), bool)
    for question, row in enumerate(rows):
        hits[question, : len(row)] = row
    return GoldHits(hits, np.array([len(row) for row in rows], int), np.array(gold, int))
