"""How well passages that were found cover the gold ones: recall, full recall, mAP, @K, η_re, hits and MRR (R2AG, Table 1)."""

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
    """Which of the passages found for each question are gold; a passage that comes again is not counted again.

    Metrics have one value a question: NaN where it has no gold passage.
    """

    hits: Bool[np.ndarray, "Q K"]
    """True where a gold passage stands at that rank, best first; ranks count passages that differ."""
    found: Int[np.ndarray, "Q"]
    """Passages that differ, of each question."""
    gold: Int[np.ndarray, "Q"]
    """Gold passages of each question."""

    def recall(self, k: int | None = None) -> Float[np.ndarray, "Q"]:
        """Recall@K: share of the gold passages among the first k (None: all that were found)."""
        return self._share(self.hits[:, :k].sum(1))

    def full_recall(self, k: int | None = None) -> Float[np.ndarray, "Q"]:
        """1 where every gold passage is among the first k, else 0."""
        return self._known(self.hits[:, :k].sum(1) == self.gold)

    def average_precision(self, k: int | None = None) -> Float[np.ndarray, "Q"]:
        """Sum of the precision at the rank of each gold passage found, over the number of gold ones (R2AG, Eq. 5's R_AP).

        Its mean over questions is mAP.
        """
        hits = self.hits[:, :k]
        precision = np.cumsum(hits, 1) / np.arange(1, hits.shape[1] + 1)
        return self._share((precision * hits).sum(1))

    def hit(self, k: int | None = None) -> Float[np.ndarray, "Q"]:
        """hits@k: 1 where any gold passage is among the first k, else 0."""
        return self._known(np.asarray(self.hits[:, :k].any(1)))

    def reciprocal_rank(self, k: int | None = None) -> Float[np.ndarray, "Q"]:
        """1 over the rank of the first gold passage, 0 where none is among the first k; its mean is MRR@k."""
        hits = self.hits[:, :k]
        first = hits.argmax(1) + 1 if hits.shape[1] else np.ones(len(hits))
        return self._known(hits.any(1) / first)

    def metrics(self, k: int | None = None) -> dict[str, Float[np.ndarray, "Q"]]:
        """All of these by the names that reports give to their means."""
        return {
            "recall": self.recall(k),
            "full_recall": self.full_recall(k),
            "map": self.average_precision(k),
            "hits": self.hit(k),
            "mrr": self.reciprocal_rank(k),
        }

    def report(self, cuts: Sequence[int] = ()) -> dict[str, float]:
        """Means over the questions that have gold passages: recall, full_recall, map, hits, mrr, each also "@k" for the cuts,
        "passages" (@K) and "eta_re"; empty where no question has any.

        Raises UserError for a cut below 1.
        """
        if any(k < 1 for k in cuts):
            raise UserError(f"cuts={list(cuts)}: must be 1 or more")
        known = self.gold > 0
        if not known.any():
            return {}
        report = {
            name + (f"@{k}" if k else ""): float(np.nanmean(values))
            for k in (None, *cuts)
            for name, values in self.metrics(k).items()
        }
        report["passages"] = float(self.found[known].mean())
        report["eta_re"] = gold_efficiency(
            report["recall"], report["passages"], float(self.gold[known].mean())
        )
        return report

    def _share(self, amount: np.ndarray) -> Float[np.ndarray, "Q"]:
        return np.where(self.gold > 0, amount / np.maximum(self.gold, 1), np.nan)

    def _known(self, values: np.ndarray) -> Float[np.ndarray, "Q"]:
        return np.where(self.gold > 0, values.astype(np.float64), np.nan)


def gold_key(questions: Sequence[Question], passages: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """By what gold passages are recognised: (`IDS` or `TITLES`, a warning or ""); ("", "") where no question has any.

    Ids are better, since passages may share a title. They are taken where as many questions have gold ids as have gold titles,
    and some passage has a gold id. Of a question with gold titles too, that passage must have one of them: the ids of another
    corpus are often the same numbers.

    Args:
      questions: with `gold` and `gold_ids` as far as they are known.
      passages: (id, title) of passages of the corpus, an empty title for one that is not known; read up to the first that has a
        gold id.
    """
    titled = sum(bool(question.gold) for question in questions)
    known = sum(bool(question.gold_ids) for question in questions)
    if not known or known < titled:
        few = f"only {known} questions have gold ids, {titled} have gold titles" if known else ""
        return (TITLES if titled else ""), few
    titles: dict[str, set[str]] = {}
    for question in questions:
        for identity in question.gold_ids:
            titles.setdefault(identity, set()).update(map(title_key, question.gold))
    for identity, title in passages:
        wanted = titles.get(identity)
        if wanted is not None and (not wanted or not title or title_key(title) in wanted):
            return IDS, ""
    where = ", under a gold title of its question" if titled else ""
    warning = (
        f"no passage has one of the gold ids, such as {next(iter(titles))!r}{where}: is the corpus theirs?"
    )
    return (TITLES if titled else IDS), warning


def gold_of(question: Question, key: str) -> tuple[str, ...]:
    """The gold passages of a question by a key of `gold_key`."""
    return question.gold_ids if key == IDS else question.gold


def hits_by(
    key: str,
    ids: Sequence[Sequence[str]],
    titles: Sequence[Sequence[str]],
    questions: Sequence[Question],
    repeats: bool = False,
) -> GoldHits:
    """The hits of passages found, best first, by their ids or titles (see `gold_key`); `repeats` as of `gold_hits`."""
    gold = [gold_of(question, key) for question in questions]
    return gold_hits(ids, gold, str, repeats) if key == IDS else gold_hits(titles, gold, title_key, repeats)


def gold_hits(
    found: Sequence[Sequence[str]],
    gold: Sequence[Sequence[str]],
    same: Callable[[str], str] = title_key,
    repeats: bool = False,
) -> GoldHits:
    """The hits of passages found, best first, for the gold ones of each question; both are titles, or both ids.

    Names count as equal where `same` maps them to one text: titles whatever their case and white space. A name that comes again
    is passed over; with `repeats` it takes a rank, as another passage with the same title does in a single search.

    Raises ValueError where the two are not of equal length.
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
    """Hits where no gold passages are known: a passage's text that holds a gold answer (cover-EM) is the one gold passage.

    The first such passage counts (open-domain retrieval accuracy, NQ and TriviaQA). The same text twice is one passage.
    Raises ValueError where the two are not of equal length.
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


def hits_at(ranks: Sequence[int]) -> GoldHits:
    """The hits of questions with one gold passage each, found at that rank, counted from 1; 0: it was not found."""
    rows = [[at == rank for at in range(1, rank + 1)] for rank in ranks]
    return _hits(rows, [{""}] * len(rows))


def gold_efficiency(recall: float, passages: float, gold: float) -> float:
    """η_re (R2AG, Table A.6): recall for each passage found, relative to an oracle that finds the gold ones and nothing else.

    `passages` is @K, the mean number found; `gold` the oracle's. 1 is the oracle's own; 0 where nothing was found.
    """
    return (recall / passages) / (1.0 / gold) if passages else 0.0


def _hits(rows: Sequence[Sequence[bool]], wanted: Sequence[set[str]]) -> GoldHits:
    hits = np.zeros((len(rows), max(map(len, rows), default=0)), bool)
    for at, row in enumerate(rows):
        hits[at, : len(row)] = row
    return GoldHits(
        hits, np.array([len(row) for row in rows], int), np.array([len(want) for want in wanted], int)
    )
