"""Measures of claims: functions from the results of a claim's runs to a `ClaimEvidence`.

The first sentence of a measure's docstring is the claim that it measures. `higher`, `lower` and `spread_below` return a measure.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rrl.retrieval.gold import gold_hits
from rrl.studies.reproduction.results import (
    SEED,
    EvaluationResult,
    ReproductionResults,
    refuse_incomparable,
)
from rrl.studies.reproduction.verdict import ClaimEvidence, judge_claim

Measure = Callable[[ReproductionResults, Sequence[str]], ClaimEvidence]
"""(results, names of the claim's runs) -> evidence."""


def higher(column: str) -> Measure:
    """The first run has a higher mean of this column than the second, on the same questions."""
    return lambda results, runs: _compared(results, runs, lambda run: run.columns[column], 1)


def lower(column: str) -> Measure:
    """The first run has a lower mean of this column than the second, on the same questions."""
    return lambda results, runs: _compared(results, runs, lambda run: run.columns[column], -1)


def higher_full_recall(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """The first run's searches find all gold passages of more questions than the second's."""
    return _compared(results, runs, lambda run: run.hits.full_recall(), 1)


def fewer_tokens_per_right_answer(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """On average, the first run writes fewer tokens for a question that it answers right.

    This is one number per run: the mean over the run's right answers ("tokens_when_correct" in `rrl.eval.score_report.costs`).
    Tokens of wrong answers do not count.
    """

    def cost(run: EvaluationResult) -> np.ndarray:
        right = run.columns["em"].sum()
        return np.array([run.columns["tokens"] @ run.columns["em"] / right if right else np.inf])

    return _compared(results, runs, cost, -1)


def higher_than_best_other(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """The first run has a higher exact match than the best of the others."""
    others = {name: results.evaluations(name)[0].columns["em"].mean() for name in runs[1:]}
    return higher("em")(results, (runs[0], max(others, key=lambda name: others[name])))


def best_higher_than_last(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """The best of all runs but the last has a higher exact match than the last."""
    means = {name: results.evaluations(name)[0].columns["em"].mean() for name in runs[:-1]}
    return higher("em")(results, (max(means, key=lambda name: means[name]), runs[-1]))


def spread_below(points: float) -> Measure:
    """The best and the worst of the runs (one per retriever) differ by fewer than `points` points of exact match.

    Best and worst are chosen once per seed. A bootstrap that chose them again in each resample would overestimate the spread.
    """

    def measure(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
        evaluations = {name: results.evaluations(name) for name in runs}
        refuse_incomparable({name: each[0] for name, each in evaluations.items()})
        spread, margins = [], []
        for runs_of_seed in zip(*evaluations.values(), strict=True):
            by_accuracy = sorted((run.columns["em"] for run in runs_of_seed), key=np.mean)
            difference = by_accuracy[-1] - by_accuracy[0]
            spread.append(float(difference.mean()))
            margins.append(points / 100 - difference)
        return ClaimEvidence([points / 100], spread, margins)

    return measure


def higher_with_each_retriever(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """The policy has a higher exact match than the baseline with each retriever.

    The evidence is that of the retriever with the least certain lead. If the policy leads with every retriever, this is the one
    whose interval begins lowest; otherwise it is the one with the lowest difference.

    `runs` are those of the policy, one per retriever, followed by those of the baseline in the same order.
    """
    half = len(runs) // 2
    pairs = [higher("em")(results, pair) for pair in zip(runs[:half], runs[half:], strict=True)]

    def certainty(pair: ClaimEvidence) -> tuple[float, float]:
        verdict = judge_claim(pair)
        return min(verdict.difference, 0.0), verdict.low

    return min(pairs, key=certainty)


def higher_recall_at_equal_passages(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """The first run has a higher full recall than the second with as many passages (R2AG, Table 1: "under comparable k").

    The first run is a tree of searches; the second searches once, with the question. If the tree retrieved k passages for a
    question, the first k passages of the single search count. The single search is limited to m passages (m is the largest number
    that it returned for any question), so only the first m passages of the tree count.
    """
    (single,) = results.evaluations(runs[1])
    refuse_incomparable({runs[0]: results.evaluations(runs[0])[0], runs[1]: single})
    ranked = [list(dict.fromkeys(titles)) for titles in single.titles]
    max_passages = max(map(len, ranked))
    left, right = [], []
    for tree in results.evaluations(runs[0]):
        hits = tree.hits
        cut = [titles[:count] for titles, count in zip(ranked, hits.retrieved.tolist(), strict=True)]
        left.append(hits.full_recall(max_passages))
        right.append(gold_hits(cut, single.gold).full_recall())
    return _evidence(left, right, 1)


def smaller_reward_drop(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """From its maximum to the end of training, the answer reward of the first run drops less than that of the second.

    The drop is the mean reward of the best quarter of the updates minus that of the last quarter.
    """

    def drop(lines: Sequence[Mapping[str, float]]) -> np.ndarray:
        rewards = [line["reward/answer"] for line in lines if "reward/answer" in line]
        quarters = [part.mean() for part in np.array_split(rewards, min(4, len(rewards)))]
        return np.array([max(quarters) - quarters[-1]])

    left, right = ([drop(lines) for lines in results.trainings(name)] for name in runs)
    return _evidence(left, right, -1)


def _compared(
    results: ReproductionResults,
    runs: Sequence[str],
    values: Callable[[EvaluationResult], np.ndarray],
    sign: int,
) -> ClaimEvidence:
    """Return the differences between the first and the second run, question by question; `sign` is -1 if lower is better."""
    left, right = (results.evaluations(name) for name in runs)
    refuse_incomparable({runs[0]: left[0], runs[1]: right[0]})
    trained = any(SEED in name for name in runs)
    return dataclasses.replace(
        _evidence([values(run) for run in left], [values(run) for run in right], sign), trained=trained
    )


def _evidence(left: Sequence[np.ndarray], right: Sequence[np.ndarray], sign: int) -> ClaimEvidence:
    """Return the evidence; `left` and `right` have one array per seed.

    Seeds are paired in order. A side that was not trained has a single array, which is paired with each seed of the other side.
    """
    pairs = [
        (left[index % len(left)], right[index % len(right)]) for index in range(max(len(left), len(right)))
    ]
    return ClaimEvidence(
        [float(values.mean()) for values in left],
        [float(values.mean()) for values in right],
        [sign * (ours - theirs) for ours, theirs in pairs],
    )
