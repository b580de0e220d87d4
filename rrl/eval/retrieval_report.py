"""Measure how well a retriever finds gold passages with each question as the query, without a language model."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.retrieval.gold import IDS, GoldHits, gold_key, gold_of, hits_by_answer, hits_by_key
from rrl.retrieval.retriever import Hit, Retriever
from rrl.text.normalize import RULES

GROUPS: Mapping[str, Callable[[Question], str]] = {
    "kind": lambda question: question.kind or "no kind",
    "hops": lambda question: (
        f"{question.hops} hops" if question.hops else f"{len(question.gold or question.gold_ids)} gold"
    ),
}
"""Groups of questions: by kind, or by number of hops (by number of gold passages if the file has no hops)."""
METRICS = {"recall": "recall", "full_recall": "full", "hits": "hit", "mrr": "MRR", "map": "mAP"}
"""Name of a metric in `GoldHits.metrics` -> its heading in the table."""
ANSWERS = "answers in title and text"
"""The value of `RetrievalReport.matched_by` if no question has gold passages."""


@dataclasses.dataclass(frozen=True)
class RetrievalReport:
    """Means over the questions of a file, and over groups of them."""

    cuts: tuple[int, ...]
    """Ranks k at which metrics are computed."""
    matched_by: str
    """How hits are recognised: "gold ids" or "gold titles"; `ANSWERS` if no question has gold passages."""
    left_out: int
    """Number of questions left out because they lack what `matched_by` compares: gold ids, gold titles or answers."""
    warning: str
    """Why the gold ids of the file are not used; "" otherwise."""
    groups: Mapping[str, Mapping[str, float]]
    """Group -> metric@cut -> mean in [0, 1], and "questions"; the first is "all"."""

    def as_text(self) -> str:
        """Return a table in percent."""
        width = max(len("questions"), *map(len, self.groups))
        lines = [f"{'questions':{width}}        k  " + "  ".join(f"{head:>6}" for head in METRICS.values())]
        for name, means in self.groups.items():
            for k in self.cuts:
                values = (100 * means[f"{metric}@{k}"] for metric in METRICS)
                first = (
                    f"{name:{width}} {means['questions']:5.0f}" if k == self.cuts[0] else " " * (width + 6)
                )
                lines.append(f"{first} {k:4d}  " + "  ".join(f"{value:6.1f}" for value in values))
        lines.append(
            "Percent. recall: share of the gold passages among the first k; full: all of them among the first k. "
            f"By {self.matched_by}."
        )
        if self.left_out:
            lacking = "answers" if self.matched_by == ANSWERS else self.matched_by
            lines.append(f"{self.left_out} questions without {lacking} are left out.")
        if self.warning:
            lines.append(f"Gold ids are not used: {self.warning}")
        return "\n".join(lines)


def retrieval_report(
    retriever: Retriever, questions: Sequence[Question], cuts: Sequence[int], by: str = ""
) -> RetrievalReport:
    """Search for the text of each question, and compare the hits with its gold ids or titles (see `gold_key`).

    If no question has gold passages, a passage that contains a gold answer counts instead (FlashRAG's rule).

    Args:
      retriever: the retriever to measure.
      questions: at least one.
      cuts: ranks k at which metrics are computed, each at least 1.
      by: what the questions are grouped by: a name in `GROUPS`, or "" for no groups.

    Raises:
      UserError: no questions; no question has gold passages or answers; a cut below 1; an unknown group; or the questions have
        gold ids only, and the index has none of them.
      SearchFailed: as in `Retriever.search`.
    """
    if not questions:
        raise UserError("no question to search for: give a file with at least one")
    if not cuts or min(cuts) < 1:
        raise UserError(f"k={list(cuts)}: give ranks of 1 or more, such as 1,5,20")
    if by and by not in GROUPS:
        raise UserError(f"by={by!r} is unknown; choose one of {', '.join(GROUPS)}, or leave it out")
    cuts = tuple(sorted(set(cuts)))
    measured = [q for q in questions if q.gold or q.gold_ids or q.answers]
    if not measured:
        raise UserError("no question has gold ids, gold titles or answers to look for: give another file")
    measured = [q for q in measured if q.gold or q.gold_ids] or measured
    results = retriever.search([question.text for question in measured], cuts[-1])
    passages = itertools.chain((hit.passage for result in results for hit in result), retriever.passages)
    key, warning = gold_key(measured, ((passage.id, passage.title) for passage in passages))
    if key == IDS and warning:
        raise UserError(
            f"{warning} The questions have no gold titles either; build the index from the corpus of these ids"
        )
    if key:
        pairs = [(q, result) for q, result in zip(measured, results, strict=True) if gold_of(q, key)]
        measured, results = [question for question, _ in pairs], [result for _, result in pairs]
        ids, titles = _passage_fields(results, "id"), _passage_fields(results, "title")
        # In the result of one search, a repeated title belongs to another passage, which takes a rank of its own.
        hits = hits_by_key(key, ids, titles, measured, repeats_take_ranks=True)
    else:
        texts = [[f"{hit.passage.title} {hit.passage.text}" for hit in result] for result in results]
        hits = hits_by_answer(texts, [question.answers for question in measured], RULES["flashrag"])
    labels = np.array([GROUPS[by](question) for question in measured]) if by else np.array([], str)
    masks = {"all": np.ones(len(measured), bool)}
    masks |= {label: labels == label for label in sorted(set(labels.tolist()))}
    groups = {name: _means(hits, cuts, mask) for name, mask in masks.items()}
    return RetrievalReport(cuts, key or ANSWERS, len(questions) - len(measured), warning, groups)


def _passage_fields(results: Sequence[Sequence[Hit]], field: str) -> list[list[str]]:
    """Return a field of the passages that each search found: "id" or "title"."""
    return [[getattr(hit.passage, field) for hit in result] for result in results]


def _means(hits: GoldHits, cuts: Sequence[int], mask: np.ndarray) -> dict[str, float]:
    means = {
        f"{name}@{k}": float(np.mean(values[mask])) for k in cuts for name, values in hits.metrics(k).items()
    }
    return means | {"questions": float(mask.sum())}
