"""How well a retriever finds what questions need, each asked as it is: without a language model."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.retrieval.gold import IDS, GoldHits, gold_key, gold_of, hits_by, hits_by_answer
from rrl.retrieval.retriever import Hit, Retriever
from rrl.text.normalize import RULES

GROUPS: Mapping[str, Callable[[Question], str]] = {
    "kind": lambda question: question.kind or "no kind",
    "hops": lambda question: (
        f"{question.hops} hops" if question.hops else f"{len(question.gold or question.gold_ids)} gold"
    ),
}
"""What questions may be grouped by: their kind, or their number of hops; of gold passages, if the file has no hops."""
METRICS = {"recall": "recall", "full_recall": "full", "hits": "hit", "mrr": "MRR", "map": "mAP"}
"""As `GoldHits.metrics` has them, and in the head of the table."""


@dataclasses.dataclass(frozen=True)
class RetrievalReport:
    """Means over the questions of a file, and over groups of them."""

    cuts: tuple[int, ...]
    by: str
    """"gold ids" or "gold titles", or "answers in title and text" where no question has gold passages."""
    left_out: int
    """Questions without gold passages, where others have some."""
    warning: str
    """Why gold ids that are there are not used; "" where there is nothing to say."""
    groups: Mapping[str, Mapping[str, float]]
    """Group -> metric@cut -> mean in [0, 1], and "questions"; the first is "all"."""

    def as_text(self) -> str:
        """A table in percent."""
        width = max(len("questions"), *map(len, self.groups))
        lines = [f"{'questions':{width}}        k  " + "  ".join(f"{head:>6}" for head in METRICS.values())]
        for name, found in self.groups.items():
            for k in self.cuts:
                values = (100 * found[f"{metric}@{k}"] for metric in METRICS)
                first = (
                    f"{name:{width}} {found['questions']:5.0f}" if k == self.cuts[0] else " " * (width + 6)
                )
                lines.append(f"{first} {k:4d}  " + "  ".join(f"{value:6.1f}" for value in values))
        lines.append(
            f"Percent. recall: share of the gold passages among the first k; full: all of them are there. By {self.by}."
        )
        if self.left_out:
            lines.append(f"{self.left_out} questions without gold passages are left out.")
        if self.warning:
            lines.append(f"Not by gold ids: {self.warning}")
        return "\n".join(lines)


def retrieval_report(
    retriever: Retriever, questions: Sequence[Question], cuts: Sequence[int], by: str = ""
) -> RetrievalReport:
    """Searches for each question's own text, and compares with its gold ids or titles (see `gold_key`); where no question has
    any, a passage counts that holds a gold answer (FlashRAG's rule).

    Args:
      retriever: what is measured.
      questions: at least one.
      cuts: ranks k at which metrics are taken, each at least 1.
      by: a name of `GROUPS`, or "" for all together.

    Raises UserError for no questions, or none with anything to look for, a cut below 1, another name, and gold ids alone none of
    which the index has; SearchFailed as `Retriever.search`.
    """
    if not questions:
        raise UserError("no question to search for: give a file with at least one")
    if not cuts or min(cuts) < 1:
        raise UserError(f"k={list(cuts)}: give ranks of 1 or more, such as 1,5,20")
    if by and by not in GROUPS:
        raise UserError(f"by={by!r} is unknown; choose one of {', '.join(GROUPS)}, or leave it out")
    cuts = tuple(sorted(set(cuts)))
    asked = [q for q in questions if q.gold or q.gold_ids or q.answers]
    if not asked:
        raise UserError("no question has gold ids, gold titles or answers to look for: give another file")
    asked = [q for q in asked if q.gold or q.gold_ids] or asked
    found = retriever.search([question.text for question in asked], cuts[-1])
    passages = itertools.chain((hit.passage for hits in found for hit in hits), retriever.passages)
    key, warning = gold_key(asked, ((passage.id, passage.title) for passage in passages))
    if key == IDS and warning:
        raise UserError(
            f"{warning} The questions have no gold titles either; build the index from the corpus that their ids are of"
        )
    if key:
        rows = [(q, hits) for q, hits in zip(asked, found, strict=True) if gold_of(q, key)]
        asked, found = [question for question, _ in rows], [hits for _, hits in rows]
        hits = hits_by(key, _names(found, "id"), _names(found, "title"), asked, repeats=True)
    else:
        texts = [[f"{hit.passage.title} {hit.passage.text}" for hit in hits] for hits in found]
        hits = hits_by_answer(texts, [question.answers for question in asked], RULES["flashrag"])
    names = np.array([GROUPS[by](question) for question in asked]) if by else np.array([], str)
    chosen = {"all": np.ones(len(asked), bool)} | {str(n): names == n for n in sorted(set(names.tolist()))}
    groups = {name: _means(hits, cuts, rows) for name, rows in chosen.items()}
    way = key or "answers in title and text"
    return RetrievalReport(cuts, way, len(questions) - len(asked), warning, groups)


def _names(found: Sequence[Sequence[Hit]], field: str) -> list[list[str]]:
    """The ids or titles of what was found."""
    return [[getattr(hit.passage, field) for hit in hits] for hits in found]


def _means(hits: GoldHits, cuts: Sequence[int], rows: np.ndarray) -> dict[str, float]:
    means = {
        f"{name}@{k}": float(np.mean(values[rows])) for k in cuts for name, values in hits.metrics(k).items()
    }
    return means | {"questions": float(rows.sum())}
