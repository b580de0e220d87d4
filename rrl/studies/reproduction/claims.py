"""What the four papers claim, and how each claim is measured here.

A claim names the runs that it reads; its measure is a small function over their results.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rrl.errors import UserError
from rrl.retrieval.gold import hits_of
from rrl.studies.reproduction.results import (
    SEED,
    EvaluationResult,
    ReproductionResults,
    expand_seeds,
    refuse_incomparable,
)
from rrl.studies.reproduction.verdict import ClaimEvidence, judge_claim

Measure = Callable[[ReproductionResults, Sequence[str]], ClaimEvidence]
"""Of the results and the claim's runs."""

NO_INSTRUCTIONS_FOLLOWED = (
    "a model of a million parameters follows no instruction it was not trained on, so that prompting it step by step is no "
    "test of the paper's method"
)


@dataclasses.dataclass(frozen=True)
class Claim:
    """One row of the page."""

    key: str
    statement: str
    paper: str
    """With its table or figure."""
    paper_result: str
    """What the paper measured, in its own metric."""
    metric: str
    """What is measured here, in words."""
    runs: tuple[str, ...]
    """Names of runs, with `SEED` where each seed has one."""
    measure: Measure
    percent: bool = True
    """Whether values are shares, shown in percent."""
    untestable: str = ""
    """A reason known beforehand why this size can be no test of it."""

    def needs(self, seeds: Sequence[int]) -> list[str]:
        """The names of all runs that it reads."""
        return [name for run in self.runs for name in expand_seeds(run, seeds)]


# -- measures ------------------------------------------------------------------------------------------------------------


def higher(column: str) -> Measure:
    """The mean of a column is higher in the first run than in the second, on the same questions."""
    return lambda results, runs: _compared(results, runs, lambda run: run.columns[column], 1)


def lower(column: str) -> Measure:
    """The same: lower."""
    return lambda results, runs: _compared(results, runs, lambda run: run.columns[column], -1)


def higher_full_recall(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """The first run's searches find all gold passages of more questions than the second's."""
    return _compared(results, runs, lambda run: run.hits.full_recall(), 1)


def fewer_tokens_per_right_answer(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """Tokens written for a question that is answered right, a mean over these: one number a run."""

    def cost(run: EvaluationResult) -> np.ndarray:
        right = run.columns["em"].sum()
        return np.array([run.columns["tokens"] @ run.columns["em"] / right if right else np.inf])

    return _compared(results, runs, cost, -1)


def higher_than_best_other(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """The first run's exact match is higher than that of the best of the others."""
    others = {name: results.evaluations(name)[0].columns["em"].mean() for name in runs[1:]}
    return higher("em")(results, (runs[0], max(others, key=lambda name: others[name])))


def best_higher_than_last(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """The best exact match of all runs but the last is higher than that of the last."""
    means = {name: results.evaluations(name)[0].columns["em"].mean() for name in runs[:-1]}
    return higher("em")(results, (max(means, key=lambda name: means[name]), runs[-1]))


def spread_below(points: float) -> Measure:
    """Between the best and the worst of the runs (one for each retriever) lie fewer than so many points of exact match.

    Which of them is the best, and which the worst, is settled once for each seed: a bootstrap that chose them anew each time
    would find wider spreads than there are.
    """

    def measure(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
        found = {name: results.evaluations(name) for name in runs}
        refuse_incomparable({name: each[0] for name, each in found.items()})
        spread, room = [], []
        for seed in zip(*found.values(), strict=True):
            right = sorted((run.columns["em"] for run in seed), key=np.mean)
            apart = right[-1] - right[0]
            spread.append(float(apart.mean()))
            room.append(points / 100 - apart)
        return ClaimEvidence([points / 100], spread, room)

    return measure


def higher_with_each_retriever(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """With each retriever the policy's exact match is higher than the baseline's: that with the least certain lead is told.

    `runs` are the policy's, one for each retriever, and then the baseline's in the same order.
    """
    half = len(runs) // 2
    pairs = [higher("em")(results, pair) for pair in zip(runs[:half], runs[half:], strict=True)]

    def lead(pair: ClaimEvidence) -> tuple[float, float]:
        verdict = judge_claim(pair)
        return min(verdict.difference, 0.0), verdict.low

    return min(pairs, key=lead)


def higher_recall_at_equal_passages(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """Full recall of the first run against that of the second, cut for each question to as many passages as the first found.

    The second searched once, with the question (R2AG, Table 1: "under comparable k"); no more passages than it found count.
    """
    (single,) = results.evaluations(runs[1])
    refuse_incomparable({runs[0]: results.evaluations(runs[0])[0], runs[1]: single})
    ranked = [list(dict.fromkeys(titles)) for titles in single.titles]
    most = max(map(len, ranked))
    left, right = [], []
    for steps in results.evaluations(runs[0]):
        found = steps.hits
        own = [titles[:count] for titles, count in zip(ranked, found.found.tolist(), strict=True)]
        left.append(found.full_recall(most))
        right.append(hits_of(own, single.gold).full_recall())
    return _evidence(left, right, 1)


def smaller_reward_drop(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """How much of its best answer reward training has lost at the end: less in the first run than in the second.

    Both are means over a quarter of the updates, the last and the best one.
    """

    def lost(lines: Sequence[Mapping[str, float]]) -> np.ndarray:
        rewards = [line["reward/answer"] for line in lines if "reward/answer" in line]
        quarters = [part.mean() for part in np.array_split(rewards, min(4, len(rewards)))]
        return np.array([max(quarters) - quarters[-1]])

    left, right = ([lost(lines) for lines in results.trainings(name)] for name in runs)
    return _evidence(left, right, -1)


def _compared(
    results: ReproductionResults,
    runs: Sequence[str],
    values: Callable[[EvaluationResult], np.ndarray],
    sign: int,
) -> ClaimEvidence:
    left, right = (results.evaluations(name) for name in runs)
    refuse_incomparable({runs[0]: left[0], runs[1]: right[0]})
    trained = any(SEED in name for name in runs)
    return dataclasses.replace(
        _evidence([values(run) for run in left], [values(run) for run in right], sign), trained=trained
    )


def _evidence(left: Sequence[np.ndarray], right: Sequence[np.ndarray], sign: int) -> ClaimEvidence:
    """Seed beside seed; what has no seeds stands beside each."""
    pairs = [(left[at % len(left)], right[at % len(right)]) for at in range(max(len(left), len(right)))]
    return ClaimEvidence(
        [float(values.mean()) for values in left],
        [float(values.mean()) for values in right],
        [sign * (ours - theirs) for ours, theirs in pairs],
    )


# -- the list ------------------------------------------------------------------------------------------------------------

CLAIMS = (
    Claim(
        "rl",
        "RL answers more than its cold start",
        "R3-RAG, Table 5",
        "46.4 against 45.2 EM on HotpotQA",
        "EM, R-Search",
        (f"rsearch-{SEED}-eval", "rsearch_cold-eval"),
        higher("em"),
    ),
    Claim(
        "rl-r3rag",
        "… R3-RAG itself",
        "R3-RAG, Table 5",
        "46.4 against 45.2 EM on HotpotQA",
        "EM, R3-RAG",
        (f"r3rag-{SEED}-eval", "r3rag_cold-eval"),
        higher("em"),
    ),
    Claim(
        "rl-tiresrag",
        "… TIRESRAG-R1",
        "TIRESRAG-R1, Table 3",
        "52.8 against SFT's 28.4 EM on 2Wiki",
        "EM, TIRESRAG-R1 against a weak cold start, of 150 demonstrations (the paper's SFT learns answers alone); from 500 RL "
        "finds nothing to add (docs/recipes.md)",
        (f"tiresrag-{SEED}-eval", "tiresrag_cold-eval"),
        higher("em"),
    ),
    Claim(
        "cold-start",
        "A cold start answers more than prompted iterative RAG",
        "R3-RAG, Table 5",
        "45.2 against IRCoT's 35.7 EM on HotpotQA",
        "EM, against the better of IRCoT and ITER-RETGEN",
        ("rsearch_cold-eval", "ircot", "iter_retgen"),
        higher_than_best_other,
        untestable=NO_INSTRUCTIONS_FOLLOWED,
    ),
    Claim(
        "iterative",
        "Prompted iterative RAG answers more than naive RAG",
        "R-Search, Table 2",
        "IRCoT 31.8, ITER-RETGEN 25.5, vanilla RAG 24.4, mean of multi-hop, 3B",
        "EM, the better of IRCoT and ITER-RETGEN",
        ("ircot", "iter_retgen", "naive_rag"),
        best_higher_than_last,
        untestable=NO_INSTRUCTIONS_FOLLOWED,
    ),
    Claim(
        "naive-rag",
        "Naive RAG answers more than a closed book",
        "R-Search, Table 2",
        "29.2 against 18.0, mean of multi-hop, 7B",
        "EM",
        ("naive_rag", "direct"),
        higher("em"),
    ),
    Claim(
        "process",
        "Process reward beside outcome reward answers more than outcome alone",
        "R3-RAG, Table 2",
        "46.6 against 45.2",
        "EM, R3-RAG",
        (f"r3rag-{SEED}-eval", f"r3rag_no_process-{SEED}-eval"),
        higher("em"),
    ),
    Claim(
        "outcome",
        "Outcome reward alone answers more than the cold start",
        "R3-RAG, Table 2",
        "45.2 against 41.6",
        "EM, R3-RAG",
        (f"r3rag_no_process-{SEED}-eval", "r3rag_cold-eval"),
        higher("em"),
    ),
    Claim(
        "evidence",
        "With the evidence rewards R-Search answers more than without",
        "R-Search, Table 3",
        "72.6 against 66.6 F1 on 2Wiki, 3B; without writing evidence either",
        "F1; without its rewards evidence is still written, as the cold start shows it",
        (f"rsearch-{SEED}-eval", f"rsearch_no_evidence-{SEED}-eval"),
        higher("f1"),
    ),
    Claim(
        "grpo-ppo",
        "GRPO answers more than PPO",
        "R-Search, Table 4",
        "72.6 against 60.3 F1 on 2Wiki, 3B",
        "F1, R-Search, about as many minutes each",
        (f"rsearch-{SEED}-eval", f"rsearch_ppo-{SEED}-eval"),
        higher("f1"),
    ),
    Claim(
        "tiresrag",
        "TIRESRAG-R1's rewards, filter and weights answer more than naive GRPO",
        "TIRESRAG-R1, Table 7",
        "59.6 against 53.1 F1 on 2Wiki",
        "F1",
        (f"tiresrag-{SEED}-eval", f"tiresrag_naive-{SEED}-eval"),
        higher("f1"),
    ),
    Claim(
        "filter",
        "With the group filter it answers more than without",
        "TIRESRAG-R1, Table 7",
        "59.6 against 26.5 F1 on 2Wiki",
        "F1",
        (f"tiresrag-{SEED}-eval", f"tiresrag_no_filter-{SEED}-eval"),
        higher("f1"),
    ),
    Claim(
        "collapse",
        "Without the filter training collapses late",
        "TIRESRAG-R1, Figure 6, appendix F",
        "the answer reward of naive GRPO drops sharply",
        "answer reward in training that the last quarter lost of the best one, against naive GRPO; 0 where it never stopped "
        "rising",
        (f"tiresrag-{SEED}", f"tiresrag_naive-{SEED}"),
        smaller_reward_drop,
    ),
    Claim(
        "retrievers",
        "A policy keeps its accuracy with other retrievers: within 3 points",
        "R3-RAG, Table 3",
        "61.7, 63.9, 64.7 ACC with BM25, E5, BGE",
        "EM, R3-RAG; 3 points against the best less the worst of ScaNN, exact and BM25",
        (f"r3rag-{SEED}-eval", f"r3rag-{SEED}-exact", f"r3rag-{SEED}-bm25"),
        spread_below(3),
    ),
    Claim(
        "retrievers-rl",
        "… what RL brought is there with each of them",
        "R3-RAG, Table 5",
        "44.9 against its cold start's 43.5 EM on HotpotQA with BM25",
        "EM, R3-RAG against its cold start, where its lead is least certain",
        (
            *(f"r3rag-{SEED}-{name}" for name in ("eval", "exact", "bm25")),
            *("r3rag_cold-eval", "r3rag_cold-exact", "r3rag_cold-bm25"),
        ),
        higher_with_each_retriever,
    ),
    Claim(
        "retrievers-lead",
        "… and its lead with each of them",
        "R3-RAG, Table 3",
        "61.7 against 41.2 ACC of the best baseline with BM25",
        "EM, R3-RAG against naive RAG, where its lead is least certain",
        (
            *(f"r3rag-{SEED}-{name}" for name in ("eval", "exact", "bm25")),
            *("naive_rag", "naive_rag_exact", "naive_rag_bm25"),
        ),
        higher_with_each_retriever,
    ),
    Claim(
        "tree",
        "A tree of searches finds more than a single one with as many passages",
        "R2AG, Table 1",
        "full recall 94.1 with 4.5 passages against 0.2 with 5 on 2Wiki",
        "full recall",
        (f"r2ag-{SEED}-eval", "naive_rag_top16"),
        higher_recall_at_equal_passages,
    ),
    Claim(
        "tree-rl",
        "RL makes the tree find more than without",
        "R2AG, Table 5",
        "full recall 46.8 against 34.9 on MuSiQue, of a prompted model",
        "full recall, against a weak cold start, of 150 demonstrations; from 500 RL adds some 4 points (docs/recipes.md)",
        (f"r2ag-{SEED}-eval", "r2ag_cold-eval"),
        higher_full_recall,
    ),
    Claim(
        "tokens",
        "TIRESRAG-R1 writes less than naive GRPO",
        "TIRESRAG-R1, Table 5",
        "274 against 324 tokens of thinking",
        "tokens written for a question",
        (f"tiresrag-{SEED}-eval", f"tiresrag_naive-{SEED}-eval"),
        lower("tokens"),
        percent=False,
    ),
    Claim(
        "searches",
        "… and searches less",
        "TIRESRAG-R1, Table 5",
        "2.35 against 2.93",
        "searches for a question",
        (f"tiresrag-{SEED}-eval", f"tiresrag_naive-{SEED}-eval"),
        lower("searches"),
        percent=False,
    ),
    Claim(
        "tokens-r3rag",
        "Process reward needs fewer tokens for a right answer than outcome alone",
        "R3-RAG, Table 4",
        "405 against 524 of ReSearch, which is paid for outcomes alone",
        "tokens written for the questions answered right, against R3-RAG itself without process reward",
        (f"r3rag-{SEED}-eval", f"r3rag_no_process-{SEED}-eval"),
        fewer_tokens_per_right_answer,
        percent=False,
    ),
)


def claims_named(keys: Sequence[str]) -> list[Claim]:
    """These claims in the order of the list, all of them for none. Raises UserError for an unknown one."""
    known = [claim.key for claim in CLAIMS]
    if unknown := [key for key in keys if key not in known]:
        raise UserError(f"only={','.join(unknown)} is unknown; the claims are {', '.join(known)}")
    return [claim for claim in CLAIMS if not keys or claim.key in keys]
