"""Measure how well retrieved passages cover the gold ones: recall, full recall, mAP, @K, η_re, hits and MRR (R2AG, Table 1).

Read `hits_by_key` first; `GoldHits` computes the metrics.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.text.metrics import score_answers
from rrl.text.normalize import RRL, Rule, title_key

IDS, TITLES = "gold ids", "gold titles"


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
        return self._known(self.hits[:, :k].sum(1) == self.gold)

    def average_precision(self, k: int | None = None) -> Float[np.ndarray, "Q"]:
        """Return the sum of the precision at the rank of each retrieved gold passage, over the number of gold passages.

        This is R_AP of R2AG, Eq. 5. Its mean over questions is mAP.
        """
        hits = self.hits[:, :k]
        precision = np.cumsum(hits, 1) / np.arange(1, hits.shape[1] + 1)
        return self._share((precision * hits).sum(1))

    def hit(self, k: int | None = None) -> Float[np.ndarray, "Q"]:
        """Return hits@k: 1 if any gold passage is among the first k, else 0."""
        return self._known(np.asarray(self.hits[:, :k].any(1)))

    def reciprocal_rank(self, k: int | None = None) -> Float[np.ndarray, "Q"]:
        """Return 1 over the rank of the first gold passage, or 0 if none is among the first k. Its mean is MRR@k."""
        hits = self.hits[:, :k]
        first = hits.argmax(1) + 1 if hits.shape[1] else np.ones(len(hits))
        return self._known(hits.any(1) / first)

    def metrics(self, k: int | None = None) -> dict[str, Float[np.ndarray, "Q"]]:
        """Return all metrics by name."""
        return {
            "recall": self.recall(k),
            "full_recall": self.full_recall(k),
            "map": self.average_precision(k),
            "hits": self.hit(k),
            "mrr": self.reciprocal_rank(k),
        }

    def report(self, cuts: Sequence[int] = ()) -> dict[str, float]:
        """Return means over the questions that have gold passages; {} if no question has any.

        The keys: recall, full_recall, map, hits and mrr, each also with "@k" for every k in `cuts`; "passages" (@K); "eta_re".

        Raises UserError if a cut is below 1.
        """
        if any(k < 1 for k in cuts):
            raise UserError(f"cuts={list(cuts)}: each must be 1 or more")
        known = self.gold > 0
        if not known.any():
            return {}
        report = {
            name + (f"@{k}" if k else ""): float(np.nanmean(values))
            for k in (None, *cuts)
            for name, values in self.metrics(k).items()
        }
        report["passages"] = float(self.retrieved[known].mean())
        report["eta_re"] = gold_efficiency(
            report["recall"], report["passages"], float(self.gold[known].mean())
        )
        return report

    def _share(self, amount: np.ndarray) -> Float[np.ndarray, "Q"]:
        return np.where(self.gold > 0, amount / np.maximum(self.gold, 1), np.nan)

    def _known(self, values: np.ndarray) -> Float[np.ndarray, "Q"]:
        return np.where(self.gold > 0, values.astype(np.float64), np.nan)


def gold_key(questions: Sequence[Question], passages: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Choose how to recognise gold passages: by `IDS` or by `TITLES`.

    Ids are better, because passages may share a title. They are chosen if at least as many questions have gold ids as have gold
    titles, and some passage of the corpus has a gold id. If the question of that id has gold titles too, the passage must have
    one of them, because the ids of another corpus are often the same numbers.

    Args:
      questions: with `gold` and `gold_ids` where the data has them.
      passages: (id, title) of passages of the corpus; the title is empty if it is not known. Read up to the first match.

    Returns (`IDS` or `TITLES`, a warning or ""); ("", "") if no question has gold passages.
    """
    titled = sum(bool(question.gold) for question in questions)
    known = sum(bool(question.gold_ids) for question in questions)
    if not known or known < titled:
        warning = f"only {known} questions have gold ids, {titled} have gold titles" if known else ""
        return (TITLES if titled else ""), warning
    titles: dict[str, set[str]] = {}
    for question in questions:
        for identity in question.gold_ids:
            titles.setdefault(identity, set()).update(map(title_key, question.gold))
    for identity, title in passages:
        wanted = titles.get(identity)
        if wanted is not None and (not wanted or not title or title_key(title) in wanted):
            return IDS, ""
    where = ", under a gold title of its question" if titled else ""
    warning = f"no passage has one of the gold ids, such as {next(iter(titles))!r}{where}: do the ids belong to this corpus?"
    return (TITLES if titled else IDS), warning


def gold_of(question: Question, key: str) -> tuple[str, ...]:
    """Return the ids or titles of a question's gold passages, by a key of `gold_key`."""
    return question.gold_ids if key == IDS else question.gold


def hits_by_key(
    key: str,
    ids: Sequence[Sequence[str]],
    titles: Sequence[Sequence[str]],
    questions: Sequence[Question],
    repeats: bool = False,
) -> GoldHits:
    """Return the hits of retrieved passages, best first, by their ids or titles (see `gold_key`, `gold_hits`)."""
    gold = [gold_of(question, key) for question in questions]
    return gold_hits(ids, gold, str, repeats) if key == IDS else gold_hits(titles, gold, title_key, repeats)


def gold_hits(
    found: Sequence[Sequence[str]],
    gold: Sequence[Sequence[str]],
    same: Callable[[str], str] = title_key,
    repeats: bool = False,
) -> GoldHits:
    """Return the hits of retrieved passages.

    Args:
      found: names of the retrieved passages of each question, best first: titles or ids.
      gold: names of the gold passages of each question, of the same sort.
      same: names are equal if this maps them to the same text. By default titles match regardless of case and white space.
      repeats: whether a repeated name takes a rank, as another passage with the same title in a single search does.

    Raises ValueError if `found` and `gold` differ in length.
    """
    wanted = [{same(name) for name in names} for names in gold]
    rows = []
    for names, want in zip(found, wanted, strict=True):
        keys = list(map(same, names))
        first = {name: at for at, name in reversed(list(enumerate(keys)))}
        rows.append(
            [
                name in want and first[name] == at
                for at, name in enumerate(keys)
                if repeats or first[name] == at
            ]
        )
    return _hits(rows, wanted)


def hits_by_answer(
    found: Sequence[Sequence[str]], answers: Sequence[Sequence[str]], rule: Rule = RRL
) -> GoldHits:
    """Return hits for questions without known gold passages.

    The first text that contains a gold answer (cover-EM) counts as the one gold passage. This is the retrieval
    accuracy of open-domain question answering (NQ and TriviaQA). A repeated text is one passage.

    Raises ValueError if `found` and `answers` differ in length.
    """
    ranked = [list(dict.fromkeys(texts)) for texts in found]
    pairs = [(text, gold) for texts, gold in zip(ranked, answers, strict=True) for text in texts]
    covered = iter(score_answers([text for text, _ in pairs], [gold for _, gold in pairs], rule))
    rows = []
    for texts in ranked:
        row = [next(covered).cem > 0 for _ in texts]
        first = row.index(True) if True in row else len(row)
        rows.append([at == first for at in range(len(row))])
    return _hits(rows, [{""}] * len(rows))


def hits_from_ranks(ranks: Sequence[int]) -> GoldHits:
    """Return the hits of questions with one gold passage each, at the given rank from 1; 0: it was not retrieved."""
    rows = [[at == rank for at in range(1, rank + 1)] for rank in ranks]
    return _hits(rows, [{""}] * len(rows))


def gold_efficiency(recall: float, passages: float, gold: float) -> float:
    """Return η_re (R2AG, Table A.6): recall per retrieved passage, relative to an oracle that retrieves only the gold passages.

    `passages` is @K, the mean number of retrieved passages; `gold` is the mean number of gold passages. The oracle has 1; the
    value is 0 if nothing was retrieved.
    """
    return (recall / passages) / (1.0 / gold) if passages else 0.0


def _hits(rows: Sequence[Sequence[bool]], wanted: Sequence[set[str]]) -> GoldHits:
    hits = np.zeros((len(rows), max(map(len, rows), default=0)), bool)
    for at, row in enumerate(rows):
        hits[at, : len(row)] = row
    return GoldHits(
        hits, np.array([len(row) for row in rows], int), np.array([len(want) for want in wanted], int)
    )
