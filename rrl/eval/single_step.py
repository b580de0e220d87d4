"""Step-wise against single-step retrieval at equal K (R2AG, Tables 1 and 2)."""

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
    """What a policy's searches found, and what the question itself finds."""

    kinds: tuple[str, ...]
    """Of each question."""
    steps: GoldHits
    """The policy's."""
    single: GoldHits
    """The question as the only query, with as many passages as the policy found for that question."""
    fixed: GoldHits
    """The same with `k` passages for every question."""
    k: int
    """Their mean number, rounded up."""

    @property
    def gain(self) -> PairedComparison:
        """Recall of the policy's searches less that of the single one, at each question's own K."""
        return compare(self.single.recall(), self.steps.recall())


def compare_single_step(trajectories: Sequence[Trajectory], retriever: Retriever) -> SingleStepComparison:
    """Searches every question once with the retriever that the trajectories were made with.

    K counts passages that differ. Raises UserError where no question names gold passages.
    """
    known = [t for t in trajectories if t.question.gold]
    if not known:
        raise UserError(
            f"none of {len(trajectories)} trajectories has gold passages to look for: give data with supporting facts"
        )
    gold = [t.question.gold for t in known]
    steps = gold_hits([[title for search in t.searches for title in search.titles] for t in known], gold)
    k = max(1, math.ceil(steps.found.mean()))
    most = max(k, int(steps.found.max()))
    # Twice as many, for of passages with one title the first alone counts.
    ranked = [
        list(dict.fromkeys(hit.passage.title for hit in hits))
        for hits in retriever.search([t.question.text for t in known], 2 * most)
    ]
    own = [titles[:count] for titles, count in zip(ranked, steps.found.tolist(), strict=True)]
    return SingleStepComparison(
        kinds=tuple(t.question.kind for t in known),
        steps=steps,
        single=gold_hits(own, gold),
        fixed=gold_hits([titles[:k] for titles in ranked], gold),
        k=k,
    )


def as_text(found: SingleStepComparison) -> str:
    """A table of recall and full recall in percent, by kind of question, and the gain with its interval."""
    rows: list[tuple[str, ...]] = [
        ("", "@K", "recall", "full", "single, same K", "full", f"single, K={found.k}", "full")
    ]
    kinds = np.array(found.kinds)
    for kind in [*dict.fromkeys(sorted(set(found.kinds) - {""})), None]:
        chosen = np.ones(len(kinds), bool) if kind is None else kinds == kind
        numbers = [
            f"{100 * values[chosen].mean():.1f}"
            for hits in (found.steps, found.single, found.fixed)
            for values in (hits.recall(), hits.full_recall())
        ]
        name = "all" if kind is None else kind.replace("_", " ")
        rows.append((name, f"{found.steps.found[chosen].mean():.2f}", *numbers))
    gain = found.gain
    return "\n".join(
        [
            f"Gold passages found by the policy's searches and by the question as a single query ({len(kinds)} questions)",
            *table(rows, rule_before_last=len(rows) > 2),
            f"recall over single-step retrieval at equal K: {100 * gain.difference:+.1f} points, 95 % interval "
            f"{100 * gain.low:+.1f} to {100 * gain.high:+.1f}, p = {gain.p:.2g} ({gain.test})",
        ]
    )
