"""Compare step-wise with single-step retrieval at equal K (R2AG, Tables 1 and 2)."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from rrl.data.trajectory import Trajectory
from rrl.errors import UserError
from rrl.eval.intervals import PairedComparison, compare
from rrl.report.summary import table
from rrl.retrieval.gold import GoldHits, gold_hits
from rrl.retrieval.retriever import Retriever


@dataclasses.dataclass(frozen=True)
class SingleStepComparison:
    """Gold passages found by a policy's searches, and by the question as a single query."""

    kinds: tuple[str, ...]
    """Kind of each question."""
    step_wise: GoldHits
    """Hits of the policy's searches."""
    single_same_k: GoldHits
    """Hits of the question as the only query, with as many passages as the policy retrieved for that question."""
    single_mean_k: GoldHits
    """Hits of the question as the only query, with `k` passages for every question."""
    k: int
    """Mean number of passages that the policy retrieved per question, rounded up."""

    @property
    def gain(self) -> PairedComparison:
        """Recall of the policy's searches less that of the single query, with the same number of passages for each question."""
        return compare(self.single_same_k.recall(), self.step_wise.recall())


def compare_single_step(trajectories: Sequence[Trajectory], retriever: Retriever) -> SingleStepComparison:
    """Search every question once with the retriever of the trajectories, and compare the hits.

    Passages are matched to gold ones by title, and K counts distinct titles. Questions without gold titles are left out. Raises
    UserError if no question has any.
    """
    with_gold = [t for t in trajectories if t.question.gold]
    if not with_gold:
        raise UserError(
            f"none of the questions of {len(trajectories)} trajectories has gold titles: give data with supporting facts"
        )
    gold = [t.question.gold for t in with_gold]
    step_wise = gold_hits(
        [[title for search in t.searches for title in search.titles] for t in with_gold], gold
    )
    k = max(1, math.ceil(step_wise.retrieved.mean()))
    max_retrieved = max(k, int(step_wise.retrieved.max()))
    # Search twice as many, because only the first of several passages with the same title counts.
    ranked = [
        list(dict.fromkeys(hit.passage.title for hit in hits))
        for hits in retriever.search([t.question.text for t in with_gold], 2 * max_retrieved)
    ]
    same_k = [titles[:count] for titles, count in zip(ranked, step_wise.retrieved.tolist(), strict=True)]
    return SingleStepComparison(
        kinds=tuple(t.question.kind for t in with_gold),
        step_wise=step_wise,
        single_same_k=gold_hits(same_k, gold),
        single_mean_k=gold_hits([titles[:k] for titles in ranked], gold),
        k=k,
    )


def as_text(comparison: SingleStepComparison) -> str:
    """Return a table of recall and full recall in percent, by kind of question, and the gain with its interval."""
    rows: list[tuple[str, ...]] = [
        ("", "@K", "recall", "full", "single, same K", "full", f"single, K={comparison.k}", "full")
    ]
    kinds = np.array(comparison.kinds)
    for kind in [*dict.fromkeys(sorted(set(comparison.kinds) - {""})), None]:
        chosen = np.ones(len(kinds), bool) if kind is None else kinds == kind
        numbers = [
            f"{100 * values[chosen].mean():.1f}"
            for hits in (comparison.step_wise, comparison.single_same_k, comparison.single_mean_k)
            for values in (hits.recall(), hits.full_recall())
        ]
        name = "all" if kind is None else kind.replace("_", " ")
        rows.append((name, f"{comparison.step_wise.retrieved[chosen].mean():.2f}", *numbers))
    gain = comparison.gain
    return "\n".join(
        [
            f"Gold passages found by the policy's searches and by the question as a single query ({len(kinds)} questions)",
            *table(rows, rule_before_last=len(rows) > 2),
            f"recall over single-step retrieval at equal K: {100 * gain.difference:+.1f} points, 95 % interval "
            f"{100 * gain.low:+.1f} to {100 * gain.high:+.1f}, p = {gain.p:.2g} ({gain.test})",
        ]
    )
