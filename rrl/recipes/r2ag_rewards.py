"""One expansion of a retrieval tree: what the steering model wrote, and what that earns (R2AG, Eq. 5)."""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from rrl.text.normalize import title_key
from rrl.text.spans import boxes, without_boxes

THINK, BASE, PREDICTED = "think", "base-Q", "predicted-Q"
"""The tags of appendix B.2."""
STOP_RETRIEVAL, NONE = "stop retrieval", "none"
"""What stands in them where there is nothing to ask (Figure A.3)."""


@dataclasses.dataclass(frozen=True, slots=True)
class SteeringOutput:
    """What one output asks for."""

    base: tuple[str, ...] = ()
    """Base queries, in their order."""
    predicted: tuple[str, ...] = ()
    """Predicted queries: of hops further on."""
    stop: bool = False
    """The stop-retrieval signal."""
    has_think: bool = False
    """Whether there is a think segment."""
    query_tags: int = 0
    """Of base-Q and predicted-Q, how many stand after a think segment: 0 to 2."""


def parse_output(text: str) -> SteeringOutput:
    """Reads an output (Figure A.3): queries stand in boxes behind the first think segment, and in no other.

    Without a think segment all boxes count. A base query "stop retrieval" is the stop signal, a predicted query "none" is
    none; neither is searched, in whichever box it stands.
    """
    thought = bool(boxes(text, THINK))
    if thought:
        text = text.partition(f"<{THINK}>")[2].partition(f"</{THINK}>")[2]
        text = without_boxes(text, THINK)
    base, predicted = boxes(text, BASE), boxes(text, PREDICTED)
    signals = ("", NONE, STOP_RETRIEVAL)
    return SteeringOutput(
        base=tuple(query.strip() for query in base if _plain(query) not in signals),
        predicted=tuple(query.strip() for query in predicted if _plain(query) not in signals),
        stop=any(_plain(query) == STOP_RETRIEVAL for query in base),
        has_think=thought,
        query_tags=(bool(base) + bool(predicted)) if thought else 0,
    )


@dataclasses.dataclass(frozen=True)
class RewardWeights:
    """The coefficients of Eq. 5 (appendix B.2)."""

    multi_hit: float = 0.2
    """alpha."""
    joint_hit: float = 0.3
    """beta."""
    precision: float = 0.2
    """gamma."""
    predicted: float = 1.25
    """l: what a document counts that a predicted query finds."""
    format: float = 0.01
    """omega·R_f for each of base-Q and predicted-Q; together at most 0.02."""
    top_base: int = 4
    """t of the base queries."""
    top_predicted: int = 2
    """t of the predicted queries."""
    pay_known: bool = True
    """Whether gold documents that were there before count in R_AP, as Eq. 5 prints it."""


def expansion_rewards(
    output: SteeringOutput,
    base: Sequence[str],
    predicted: Sequence[str],
    *,
    gold: Collection[str],
    known: Collection[str] = (),
    truncated: bool = False,
    weights: RewardWeights = RewardWeights(),
) -> dict[str, float]:
    """Eq. 5 and its zeroing rules (B.2).

    A gold document that is hit twice counts once, in R_MH and in R_AP, base queries first (in R_AP those of its ranks). R_JH is
    earned by a stop signal once all gold is there, found before or by this very expansion.

    Args:
      output: what was written.
      base: title of the best document of each base query, in their order; "" where nothing was found.
      predicted: likewise of the predicted queries.
      gold: titles of all gold documents, at least one.
      known: titles of the documents found in earlier expansions.
      cut: whether the output reached its limit and was cut.
      weights: the coefficients.

    Returns:
      "multi_hit" (R_MH), "joint_hit" (R_JH), "precision" (R_AP), "written" (omega·R_f), and "total", which is 0 without a
      think segment, with a stop signal before all gold is there, and of an output that was cut.
    """
    wanted, before = {title_key(t) for t in gold}, {title_key(t) for t in known}
    seen: set[str] = set()
    ranked: set[str] = set()
    hits: list[list[bool]] = []
    new: list[int] = []
    for titles, top in ((base, weights.top_base), (predicted, weights.top_predicted)):
        row, count = [], 0
        for rank, key in enumerate(map(title_key, titles)):
            gains = key in wanted and (weights.pay_known or key not in before)
            count += key in wanted and key not in seen | before
            row.append(gains and key not in ranked)
            seen.add(key)
            if rank < top:
                ranked.add(key)
        hits.append(row)
        new.append(count)
    complete = wanted <= before | seen
    rewards = {
        "multi_hit": new[0] + weights.predicted * new[1],
        "joint_hit": float(complete and output.stop),
        "precision": average_precision(hits[0], weights.top_base, len(wanted))
        + average_precision(hits[1], weights.top_predicted, len(wanted)),
        "written": weights.format * output.query_tags,
    }
    total = (
        weights.multi_hit * rewards["multi_hit"]
        + weights.joint_hit * rewards["joint_hit"]
        + weights.precision * rewards["precision"]
        + rewards["written"]
    )
    nothing = truncated or not output.has_think or (output.stop and not complete)
    return rewards | {"total": 0.0 if nothing else total}


def average_precision(hits: Sequence[bool], top: int, gold: int) -> float:
    """R_AP of Eq. 5: the precision at each of the first `top` ranks that is a hit, summed, over the number of gold documents."""
    first = np.asarray(hits[:top], float)
    return float((np.cumsum(first) / np.arange(1, len(first) + 1) * first).sum() / gold)


def _plain(text: str) -> str:
    return " ".join(text.strip(" \t\n\"'“”‘’.!").lower().split())
