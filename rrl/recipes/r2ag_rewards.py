"""The output of the retrieval steering model for one expansion of a tree, and its reward (R2AG, Eq. 5)."""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from rrl.text.normalize import title_key
from rrl.text.spans import tag_contents, without_tags

THINK, BASE, PREDICTED = "think", "base-Q", "predicted-Q"
"""The tags of appendix B.2."""
STOP_RETRIEVAL, NONE = "stop retrieval", "none"
"""Contents of base-Q and predicted-Q that mean "no query" (Figure A.3)."""


@dataclasses.dataclass(frozen=True, slots=True)
class SteeringOutput:
    """The parsed output of one expansion."""

    base: tuple[str, ...] = ()
    """Base queries, in order."""
    predicted: tuple[str, ...] = ()
    """Predicted queries, for later hops, in order."""
    stop: bool = False
    """Whether the output gives the stop signal."""
    has_think: bool = False
    """Whether there is a think segment."""
    query_tags: int = 0
    """How many of the two tags base-Q and predicted-Q follow a think segment: 0, 1 or 2."""


def parse_output(text: str) -> SteeringOutput:
    """Parse an output (Figure A.3).

    Queries are the contents of base-Q and predicted-Q after the first think segment and outside later ones. Without a think
    segment all of them count. "stop retrieval" in base-Q is the stop signal. "stop retrieval" and "none" are never queries,
    whatever their tag.
    """
    has_think = bool(tag_contents(text, THINK))
    if has_think:
        text = text.partition(f"<{THINK}>")[2].partition(f"</{THINK}>")[2]
        text = without_tags(text, THINK)
    base, predicted = tag_contents(text, BASE), tag_contents(text, PREDICTED)
    signals = ("", NONE, STOP_RETRIEVAL)
    return SteeringOutput(
        base=tuple(query.strip() for query in base if _plain(query) not in signals),
        predicted=tuple(query.strip() for query in predicted if _plain(query) not in signals),
        stop=any(_plain(query) == STOP_RETRIEVAL for query in base),
        has_think=has_think,
        query_tags=(bool(base) + bool(predicted)) if has_think else 0,
    )


@dataclasses.dataclass(frozen=True)
class RewardWeights:
    """The coefficients of Eq. 5 (appendix B.2)."""

    multi_hit: float = 0.2
    """alpha: weight of R_MH."""
    joint_hit: float = 0.3
    """beta: weight of R_JH."""
    precision: float = 0.2
    """gamma: weight of R_AP."""
    predicted: float = 1.25
    """l: weight in R_MH of a document found by a predicted query."""
    format: float = 0.01
    """omega·R_f for each of base-Q and predicted-Q; at most 0.02 in total."""
    top_base: int = 4
    """t of R_AP for base queries."""
    top_predicted: int = 2
    """t of R_AP for predicted queries."""
    pay_known: bool = True
    """Whether R_AP also counts gold documents that earlier expansions found (Eq. 5 as printed)."""


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
    """Return the rewards of one expansion (Eq. 5) under the zeroing rules of B.2.

    A gold document that several queries hit counts once, in R_MH and in R_AP, for the first of them (base queries first). R_AP
    reads only the first t queries of each kind. If a base query after the first t hits a document, a predicted query may
    therefore still count for it in R_AP. R_JH is earned by a stop signal when all gold documents have been found, before or by
    this expansion.

    Args:
      output: the parsed output.
      base: title of the top document of each base query, in order; "" if the query found nothing.
      predicted: the same for the predicted queries.
      gold: titles of all gold documents, at least one.
      known: titles of the documents that earlier expansions found.
      truncated: whether the output is incomplete (`rrl.recipes.r2ag.Expansion.truncated`).
      weights: the coefficients.

    Returns:
      "multi_hit" (R_MH), "joint_hit" (R_JH), "precision" (R_AP), "written" (omega·R_f), and "total". "total" is 0 without a
      think segment, for a stop signal before all gold documents have been found, and for a truncated output.
    """
    gold_keys, known_keys = {title_key(t) for t in gold}, {title_key(t) for t in known}
    base_keys, predicted_keys = ([title_key(title) for title in titles] for titles in (base, predicted))
    hits, new = _count_hits(base_keys, predicted_keys, gold_keys, known_keys, weights)
    complete = gold_keys <= {*known_keys, *base_keys, *predicted_keys}
    rewards = {
        "multi_hit": new[0] + weights.predicted * new[1],
        "joint_hit": float(complete and output.stop),
        "precision": average_precision(hits[0], weights.top_base, len(gold_keys))
        + average_precision(hits[1], weights.top_predicted, len(gold_keys)),
        "written": weights.format * output.query_tags,
    }
    total = (
        weights.multi_hit * rewards["multi_hit"]
        + weights.joint_hit * rewards["joint_hit"]
        + weights.precision * rewards["precision"]
        + rewards["written"]
    )
    zeroed = truncated or not output.has_think or (output.stop and not complete)
    return rewards | {"total": 0.0 if zeroed else total}


def _count_hits(
    base: Sequence[str],
    predicted: Sequence[str],
    gold: Collection[str],
    known: Collection[str],
    weights: RewardWeights,
) -> tuple[list[list[bool]], list[int]]:
    """Return which queries hit, for R_AP, and the number of newly found gold documents, for R_MH; each per kind of query.

    All titles are keys (`title_key`). See `expansion_rewards` for the arguments.
    """
    seen: set[str] = set()  # documents of this expansion so far
    ranked: set[str] = set()  # those within the top t of their kind of query
    hits: list[list[bool]] = []
    new: list[int] = []
    for titles, top in ((base, weights.top_base), (predicted, weights.top_predicted)):
        row, new_hits = [], 0
        for rank, key in enumerate(titles):
            relevant = key in gold and (weights.pay_known or key not in known)
            new_hits += key in gold and key not in seen and key not in known
            row.append(relevant and key not in ranked)
            seen.add(key)
            if rank < top:
                ranked.add(key)
        hits.append(row)
        new.append(new_hits)
    return hits, new


def average_precision(hits: Sequence[bool], top: int, gold: int) -> float:
    """Return R_AP of Eq. 5: the precision at each hit in the first `top` ranks, summed and divided by the number of gold
    documents."""
    first = np.asarray(hits[:top], float)
    return float((np.cumsum(first) / np.arange(1, len(first) + 1) * first).sum() / gold)


def _plain(text: str) -> str:
    """Return a query in lower case, without quotes, end marks and repeated white space, to recognise signals."""
    return " ".join(text.strip(" \t\n\"'“”‘’.!").lower().split())
