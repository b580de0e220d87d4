"""The claims of the four papers, and how each one is measured here. The list is `CLAIMS`.

A claim names the runs that it reads, and a measure (`rrl.studies.reproduction.measures`).
"""

import dataclasses
from collections.abc import Sequence

from rrl.errors import UserError
from rrl.studies.reproduction.measures import (
    Measure,
    best_higher_than_last,
    fewer_tokens_per_right_answer,
    higher,
    higher_full_recall,
    higher_recall_at_equal_passages,
    higher_than_best_other,
    higher_with_each_retriever,
    lower,
    smaller_reward_drop,
    spread_below,
)
from rrl.studies.reproduction.results import SEED, expand_seeds

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
    """Whether the values are fractions, which the page shows in percent."""
    untestable: str = ""
    """A reason, known beforehand, why models of this size cannot test the claim; "": none."""

    def needs(self, seeds: Sequence[int]) -> list[str]:
        """Return the names of all runs that the claim reads."""
        return [name for run in self.runs for name in expand_seeds(run, seeds)]


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
