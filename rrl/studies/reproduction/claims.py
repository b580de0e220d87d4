"""Lists the claims of the four papers, and how each one is measured here. The list is `CLAIMS`, at the
end.

A claim names the runs that it reads. Its measure is a function from their results to a `ClaimEvidence`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rrl.errors import UserError
from rrl.retrieval.gold import gold_hits
from rrl.studies.reproduction.results import (
    SEED,
    EvaluationResult,
    ReproductionResults,
    expand_seeds,
    refuse_incomparable,
)
from rrl.studies.reproduction.verdict import ClaimEvidence, judge_claim

Measure = Callable[[ReproductionResults, Sequence[str]], ClaimEvidence]
"""(results, names of the claim's runs) -> evidence."""

NO_INSTRUCTIONS_FOLLOWED = (
    "a model of a million parameters follows no instructions that it was not trained on, so step-by-step prompting does not "
    "test the paper's method"
)


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim of a paper; one row of the page.

    A statement that begins with "…" continues the statement of the claim before it.
    """

    key: str
    statement: str
    paper: str
    """Paper and table or figure."""
    paper_result: str
    """What the paper measured, in its own metric."""
    metric: str
    """Name of the quantity that is measured here, with the recipe and the comparison if needed, for the page."""
    runs: tuple[str, ...]
    """Names of runs; `SEED` in a name stands for each seed."""
    measure: Measure
    percent: bool = True
    """Whether the values are shares, which the page shows in percent."""
    untestable: str = ""
    """A reason, known beforehand, why models of this size cannot test the claim; "": none."""

    def needs(self, seeds: Sequence[int]) -> list[str]:
        """Return the names of all runs that the claim reads."""
        return [name for run in self.runs for name in expand_seeds(run, seeds)]


# -- measures ------------------------------------------------------------------------------------------------------------


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
    """The first run writes fewer tokens per correctly answered question. This is one number per run."""

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
    """The best and the worst of the runs (one per retriever) differ by fewer than `points` points of exact
    match.

    Best and worst are chosen once per seed. A bootstrap that chose them again in each resample would
    overestimate the spread.
    """

    def measure(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
        evaluations = {name: results.evaluations(name) for name in runs}
        refuse_incomparable({name: each[0] for name, each in evaluations.items()})
        spread, margins = [], []
        for seed in zip(*evaluations.values(), strict=True):
            right = sorted((run.columns["em"] for run in seed), key=np.mean)
            difference = right[-1] - right[0]
            spread.append(float(difference.mean()))
            margins.append(points / 100 - difference)
        return ClaimEvidence([points / 100], spread, margins)

    return measure


def higher_with_each_retriever(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """The policy has a higher exact match than the baseline with each retriever.

    The evidence is that of the retriever with the least certain lead: a difference of 0 or below if there is
    one, otherwise the difference whose interval begins lowest.

    `runs` are those of the policy, one per retriever, followed by those of the baseline in the same
    order.
    """
    half = len(runs) // 2
    pairs = [higher("em")(results, pair) for pair in zip(runs[:half], runs[half:], strict=True)]

    def certainty(pair: ClaimEvidence) -> tuple[float, float]:
        verdict = judge_claim(pair)
        return min(verdict.difference, 0.0), verdict.low

    return min(pairs, key=certainty)


def higher_recall_at_equal_passages(results: ReproductionResults, runs: Sequence[str]) -> ClaimEvidence:
    """The first run has a higher full recall than the second with as many passages (R2AG, Table 1: "under
    comparable k").

    The first run is a tree of searches; the second searches once, with the question. For each question, only
    as many passages of the second run count as the first one retrieved. Of the first run, at most as many
    passages count as the second run retrieved for any question.
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
    """From its maximum to the end of training, the answer reward of the first run drops less than that of the
    second.

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
    """Return the differences between the first and the second run, question by question; `sign` is -1 if
    lower is better."""
    left, right = (results.evaluations(name) for name in runs)
    refuse_incomparable({runs[0]: left[0], runs[1]: right[0]})
    trained = any(SEED in name for name in runs)
    return dataclasses.replace(
        _evidence([values(run) for run in left], [values(run) for run in right], sign), trained=trained
    )


def _evidence(left: Sequence[np.ndarray], right: Sequence[np.ndarray], sign: int) -> ClaimEvidence:
    """Return the evidence; `left` and `right` have one array per seed.

    Seeds are paired in order. A side that was not trained has a single array, which is paired with each seed of
    the other side.
    """
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
        "RL answers more questions than its cold start",
        "R3-RAG, Table 5",
        "46.4 against 45.2 EM on HotpotQA",
        "EM, R-Search",
        (f"rsearch-{SEED}-eval", "rsearch_cold-eval"),
        higher("em"),
    ),
    Claim(
        "rl-r3rag",
        "… for R3-RAG",
        "R3-RAG, Table 5",
        "46.4 against 45.2 EM on HotpotQA",
        "EM, R3-RAG",
        (f"r3rag-{SEED}-eval", "r3rag_cold-eval"),
        higher("em"),
    ),
    Claim(
        "rl-tiresrag",
        "… for TIRESRAG-R1",
        "TIRESRAG-R1, Table 3",
        "52.8 against SFT's 28.4 EM on 2Wiki",
        "EM, TIRESRAG-R1 against a weak cold start of 150 demonstrations (the paper's SFT trains on answers only); after 500, "
        "RL brings no gain (docs/recipes.md)",
        (f"tiresrag-{SEED}-eval", "tiresrag_cold-eval"),
        higher("em"),
    ),
    Claim(
        "cold-start",
        "A cold start answers more questions than prompted iterative RAG",
        "R3-RAG, Table 5",
        "45.2 against IRCoT's 35.7 EM on HotpotQA",
        "EM, against the better of IRCoT and ITER-RETGEN",
        ("rsearch_cold-eval", "ircot", "iter_retgen"),
        higher_than_best_other,
        untestable=NO_INSTRUCTIONS_FOLLOWED,
    ),
    Claim(
        "iterative",
        "Prompted iterative RAG answers more questions than naive RAG",
        "R-Search, Table 2",
        "IRCoT 31.8, ITER-RETGEN 25.5, vanilla RAG 24.4, mean of multi-hop, 3B",
        "EM, the better of IRCoT and ITER-RETGEN",
        ("ircot", "iter_retgen", "naive_rag"),
        best_higher_than_last,
        untestable=NO_INSTRUCTIONS_FOLLOWED,
    ),
    Claim(
        "naive-rag",
        "Naive RAG answers more questions than closed-book answering",
        "R-Search, Table 2",
        "29.2 against 18.0, mean of multi-hop, 7B",
        "EM",
        ("naive_rag", "direct"),
        higher("em"),
    ),
    Claim(
        "process",
        "Process and outcome reward together answer more questions than outcome reward alone",
        "R3-RAG, Table 2",
        "46.6 against 45.2",
        "EM, R3-RAG",
        (f"r3rag-{SEED}-eval", f"r3rag_no_process-{SEED}-eval"),
        higher("em"),
    ),
    Claim(
        "outcome",
        "Outcome reward alone answers more questions than the cold start",
        "R3-RAG, Table 2",
        "45.2 against 41.6",
        "EM, R3-RAG",
        (f"r3rag_no_process-{SEED}-eval", "r3rag_cold-eval"),
        higher("em"),
    ),
    Claim(
        "evidence",
        "R-Search answers more questions with its evidence rewards than without",
        "R-Search, Table 3",
        "72.6 against 66.6 F1 on 2Wiki, 3B; its ablation writes no evidence at all",
        "F1; the ablated policy still writes evidence, as in its demonstrations",
        (f"rsearch-{SEED}-eval", f"rsearch_no_evidence-{SEED}-eval"),
        higher("f1"),
    ),
    Claim(
        "grpo-ppo",
        "GRPO answers more questions than PPO",
        "R-Search, Table 4",
        "72.6 against 60.3 F1 on 2Wiki, 3B",
        "F1, R-Search, about equal training time",
        (f"rsearch-{SEED}-eval", f"rsearch_ppo-{SEED}-eval"),
        higher("f1"),
    ),
    Claim(
        "tiresrag",
        "TIRESRAG-R1's rewards, filter and weights answer more questions than naive GRPO",
        "TIRESRAG-R1, Table 7",
        "59.6 against 53.1 F1 on 2Wiki",
        "F1",
        (f"tiresrag-{SEED}-eval", f"tiresrag_naive-{SEED}-eval"),
        higher("f1"),
    ),
    Claim(
        "filter",
        "TIRESRAG-R1 answers more questions with its group filter than without",
        "TIRESRAG-R1, Table 7",
        "59.6 against 26.5 F1 on 2Wiki",
        "F1",
        (f"tiresrag-{SEED}-eval", f"tiresrag_no_filter-{SEED}-eval"),
        higher("f1"),
    ),
    Claim(
        "collapse",
        "Without the filter, training collapses late",
        "TIRESRAG-R1, Figure 6, appendix F",
        "the answer reward of naive GRPO drops sharply",
        "training answer reward: best quarter of the updates less the last quarter, against naive GRPO; 0 if the last quarter "
        "is the best",
        (f"tiresrag-{SEED}", f"tiresrag_naive-{SEED}"),
        smaller_reward_drop,
    ),
    Claim(
        "retrievers",
        "A policy keeps its accuracy with other retrievers, within 3 points",
        "R3-RAG, Table 3",
        "61.7, 63.9, 64.7 ACC with BM25, E5, BGE",
        "EM, R3-RAG; 3 points against the difference of best and worst of ScaNN, exact and BM25",
        (f"r3rag-{SEED}-eval", f"r3rag-{SEED}-exact", f"r3rag-{SEED}-bm25"),
        spread_below(3),
    ),
    Claim(
        "retrievers-rl",
        "… and its gain from RL with each of them",
        "R3-RAG, Table 5",
        "44.9 against its cold start's 43.5 EM on HotpotQA with BM25",
        "EM, R3-RAG against its cold start, with the retriever whose lead is least certain",
        (
            *(f"r3rag-{SEED}-{name}" for name in ("eval", "exact", "bm25")),
            *("r3rag_cold-eval", "r3rag_cold-exact", "r3rag_cold-bm25"),
        ),
        higher_with_each_retriever,
    ),
    Claim(
        "retrievers-lead",
        "… and its lead over naive RAG with each of them",
        "R3-RAG, Table 3",
        "61.7 against 41.2 ACC of the best baseline with BM25",
        "EM, R3-RAG against naive RAG, with the retriever whose lead is least certain",
        (
            *(f"r3rag-{SEED}-{name}" for name in ("eval", "exact", "bm25")),
            *("naive_rag", "naive_rag_exact", "naive_rag_bm25"),
        ),
        higher_with_each_retriever,
    ),
    Claim(
        "tree",
        "A tree of searches finds more than a single search with as many passages",
        "R2AG, Table 1",
        "full recall 94.1 with 4.5 passages against 0.2 with 5 on 2Wiki",
        "full recall",
        (f"r2ag-{SEED}-eval", "naive_rag_top16"),
        higher_recall_at_equal_passages,
    ),
    Claim(
        "tree-rl",
        "RL makes the tree find more",
        "R2AG, Table 5",
        "full recall 46.8 against 34.9 on MuSiQue (prompted model)",
        "full recall, against a weak cold start of 150 demonstrations; after 500, RL adds about 4 points (docs/recipes.md)",
        (f"r2ag-{SEED}-eval", "r2ag_cold-eval"),
        higher_full_recall,
    ),
    Claim(
        "tokens",
        "TIRESRAG-R1 writes less than naive GRPO",
        "TIRESRAG-R1, Table 5",
        "274 against 324 tokens of thinking",
        "tokens written per question",
        (f"tiresrag-{SEED}-eval", f"tiresrag_naive-{SEED}-eval"),
        lower("tokens"),
        percent=False,
    ),
    Claim(
        "searches",
        "… and searches less",
        "TIRESRAG-R1, Table 5",
        "2.35 against 2.93",
        "searches per question",
        (f"tiresrag-{SEED}-eval", f"tiresrag_naive-{SEED}-eval"),
        lower("searches"),
        percent=False,
    ),
    Claim(
        "tokens-r3rag",
        "With process reward, a correct answer takes fewer tokens than with outcome reward alone",
        "R3-RAG, Table 4",
        "405 against 524 of ReSearch, which has an outcome reward only",
        "tokens written per correctly answered question, against R3-RAG without process reward",
        (f"r3rag-{SEED}-eval", f"r3rag_no_process-{SEED}-eval"),
        fewer_tokens_per_right_answer,
        percent=False,
    ),
)


def claims_named(keys: Sequence[str]) -> list[Claim]:
    """Return the claims with these keys in the order of the list; all claims if `keys` is empty.

    Raises UserError for an unknown key.
    """
    known = [claim.key for claim in CLAIMS]
    if unknown := [key for key in keys if key not in known]:
        raise UserError(f"only={','.join(unknown)} is unknown; the claims are {', '.join(known)}")
    return [claim for claim in CLAIMS if not keys or claim.key in keys]
