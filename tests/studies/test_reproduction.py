"""Tests of the reproduction's claims: from made-up results to verdicts."""

import dataclasses
import re

import numpy as np
import pytest

from rrl.errors import UserError
from rrl.eval.intervals import student
from rrl.studies.reproduction.claims import claims_named
from rrl.studies.reproduction.options import parse_seeds
from rrl.studies.reproduction.results import EvaluationResult, ReproductionResults
from rrl.studies.reproduction.verdict import FAILS, HOLDS, UNTESTED, ClaimEvidence, judge_claim

SEEDS = (0, 1, 2)


# -- verdicts ------------------------------------------------------------------------------------------------------------


def test_the_interval_over_seeds_equals_a_t_table():
    interval = student([1.0, 2.0, 3.0])  # t(0.975, 2) = 4.303; 4.303 / sqrt(3) = 2.484
    assert (round(interval.low, 3), interval.mean, round(interval.high, 3)) == (-0.484, 2.0, 4.484)
    with pytest.raises(UserError, match="two or more"):
        student([1.0])


def seeds_that_differ_by(*means, questions=1, trained=True):
    return ClaimEvidence([0.5], [0.4], [np.full(questions, mean) for mean in means], trained)


@pytest.mark.parametrize(
    ("evidence", "word"),
    [
        (seeds_that_differ_by(2.9, 3.0, 3.1), HOLDS),
        (seeds_that_differ_by(1.0, 2.0, 3.0), UNTESTED),  # [-0.5, 4.5]
        (seeds_that_differ_by(-3.0, -2.0, -1.0), FAILS),
        (seeds_that_differ_by(-9.0, 4.0, 4.0), FAILS),  # the mean is not above 0
        (seeds_that_differ_by(0.0, 0.0, 0.0), FAILS),
        (seeds_that_differ_by(3.0), UNTESTED),  # one seed
        (seeds_that_differ_by(3.0, questions=5), UNTESTED),  # questions do not replace seeds
        (seeds_that_differ_by(3.0, questions=5, trained=False), HOLDS),  # nothing was trained
        (seeds_that_differ_by(np.inf, 1.0, 1.0), UNTESTED),
    ],
)
def test_a_claim_holds_if_the_interval_is_above_0_and_fails_if_the_mean_is_not(evidence, word):
    assert judge_claim(evidence).word == word


def test_the_interval_is_the_wider_of_seeds_and_questions():
    answers = np.array([1.0, 1.0, 1.0, -1.0])  # seeds agree, questions do not
    alike = ClaimEvidence([0.5], [0.0], [answers, answers, answers])
    found = judge_claim(alike)
    assert (found.word, found.difference, found.low, found.high) == (UNTESTED, 0.5, -0.5, 1.0)
    both = judge_claim(
        ClaimEvidence([0.5], [0.0], [answers, np.array([1.0, -1.0, 1.0, 1.0]), np.ones(4) / 2])
    )
    assert both.low > -0.5  # the mean over seeds varies less over questions than one seed
    apart = judge_claim(ClaimEvidence([0.5], [0.0], [np.full(4, mean) for mean in (0.0, 0.5, 1.0)]))
    assert round(apart.low, 3) == round(0.5 - 4.303 * 0.5 / 3**0.5, 3)


def test_an_untestable_claim_stays_untested_whatever_was_measured():
    found = judge_claim(seeds_that_differ_by(3.0, 3.0, 3.0), "too small")
    assert (found.word, found.reason) == (UNTESTED, "too small")


# -- claims --------------------------------------------------------------------------------------------------------------


def evaluation(em=(1, 0), f1=None, tokens=(10, 10), searches=(1, 1), titles=(("A",), ("B",))):
    columns = {"em": em, "f1": f1 or em, "tokens": tokens, "searches": searches}
    return EvaluationResult(
        ["a", "b"],
        {name: np.array(values, float) for name, values in columns.items()},
        titles,
        (("A", "B"), ("B",)),
    )


def measured(key, evaluations=None, trainings=None):
    (claim,) = claims_named([key])
    made = evaluations or {}

    def of(name):
        return next(value for part, value in made.items() if re.fullmatch(part, name))

    return claim.measure(ReproductionResults(SEEDS, of, lambda name: (trainings or {})[name]), claim.runs)


def test_seeds_are_paired_with_seeds_or_with_a_single_run():
    found = measured(
        "rl",
        {
            "rsearch-0-eval": evaluation((1, 1)),
            r"rsearch-\d-eval": evaluation((1, 0)),
            "rsearch_cold-eval": evaluation((0, 0)),
        },
    )
    assert (list(found.left), list(found.right), found.questions) == ([1.0, 0.5, 0.5], [0.0], 2)
    assert [list(values) for values in found.differences] == [[1, 1], [1, 0], [1, 0]] and found.trained
    naive = measured("naive-rag", {"naive_rag": evaluation((1, 1)), "direct": evaluation((0, 1))})
    assert [list(values) for values in naive.differences] == [[1, 0]] and not naive.trained


def test_fewer_tokens_and_searches_favour_the_claim():
    ours, theirs = evaluation(tokens=(10, 20), searches=(1, 1)), evaluation(tokens=(30, 20), searches=(1, 3))
    made = {r"tiresrag-\d-eval": ours, r"tiresrag_naive-\d-eval": theirs}
    assert [v.mean() for v in measured("tokens", made).differences] == [10, 10, 10]
    assert [v.mean() for v in measured("searches", made).differences] == [1, 1, 1]
    made = {
        r"r3rag-\d-eval": evaluation((1, 1), tokens=(30, 30)),
        r"r3rag_no.*": evaluation((1, 0), tokens=(40, 20)),
    }
    found = measured("tokens-r3rag", made)  # correctly answered: 30 and 30 against 40
    assert (found.left[0], found.right[0], found.questions) == (30, 40, 0)
    assert [v.mean() for v in found.differences] == [10, 10, 10]
    made[r"r3rag_no.*"] = evaluation((0, 0))
    assert judge_claim(measured("tokens-r3rag", made)).reason == "a run has no correct answer"


def test_the_better_of_two_prompted_methods_is_compared():
    made = {
        "ircot": evaluation((0, 0)),
        "iter_retgen": evaluation((1, 0)),
        "naive_rag": evaluation((0, 0)),
        "rsearch_cold-eval": evaluation((1, 1)),
    }
    assert measured("iterative", made).left == measured("cold-start", made).right == [0.5]
    assert (
        judge_claim(measured("iterative", made), claims_named(["iterative"])[0].untestable).word == UNTESTED
    )


def test_retriever_claims_use_the_spread_and_the_smallest_lead():
    made = {
        r"r3rag-\d-eval": evaluation((1, 1)),
        r"r3rag-\d-exact": evaluation((1, 1)),
        "r3rag-2-bm25": evaluation((1, 0)),
        r"r3rag-\d-bm25": evaluation((1, 1)),
        "naive_rag_bm25": evaluation((1, 0)),
        "naive_rag.*": evaluation((0, 0)),
    }
    spread = measured("retrievers", made)
    assert list(spread.right) == [0, 0, 0.5] and list(spread.left) == [0.03]
    assert [[round(float(v), 2) for v in seed] for seed in spread.differences] == [
        [0.03, 0.03],
        [0.03, 0.03],
        [0.03, -0.97],
    ]
    lead = measured("retrievers-lead", made)
    assert (list(lead.left), list(lead.right)) == ([1, 1, 0.5], [0.5])


def test_a_tree_is_compared_with_as_many_passages_of_a_single_search():
    made = {
        r"r2ag-\d-eval": evaluation(titles=(("A", "A", "B"), ("B",))),  # two passages, then one
        "naive_rag_top16": evaluation(titles=(("A", "C", "B"), ("B", "A"))),
    }
    found = measured("tree", made)
    assert (found.left[0], found.right[0]) == (1.0, 0.5)  # B is only the third passage of the first question
    assert [list(values) for values in found.differences] == [[1, 0]] * 3
    made[r"r2ag-\d-eval"] = evaluation(titles=(("C", "D", "E", "A", "B"), ("B",)))
    assert (
        measured("tree", made).left[0] == 0.5
    )  # the single search found three passages, so the tree's first three count


def test_collapse_is_the_best_quarter_less_the_last_quarter():
    steady = [{"reward/answer": value} for value in (0.2, 0.4, 0.5, 0.5)]
    fallen = [{"reward/answer": value} for value in (0.2, 0.6, 0.5, 0.1)] + [{"eval/em": 0.5}]
    trainings = {f"tiresrag-{s}": steady for s in SEEDS} | {f"tiresrag_naive-{s}": fallen for s in SEEDS}
    found = measured("collapse", trainings=trainings)
    assert (found.left[0], round(found.right[0], 9)) == (0, 0.5)
    assert judge_claim(found).word == HOLDS


def test_runs_with_different_questions_are_not_compared():
    other = dataclasses.replace(evaluation(), ids=["a", "c"])
    with pytest.raises(UserError, match="naive_rag and direct answered different questions"):
        measured("naive-rag", {"naive_rag": evaluation(), "direct": other})
    with pytest.raises(UserError, match="and naive_rag_top16 answered different questions"):
        measured("tree", {r"r2ag-\d-eval": evaluation(), "naive_rag_top16": other})


def test_runs_over_different_corpora_are_not_compared():
    one, two = (dataclasses.replace(evaluation(), corpus_sha256=sha) for sha in "xy")
    closed = evaluation()  # without a search
    assert measured("naive-rag", {"naive_rag": one, "direct": closed}).left == [0.5]
    with pytest.raises(UserError, match="ircot and naive_rag searched different corpora; delete those"):
        measured("iterative", {"ircot": one, "iter_retgen": one, "naive_rag": two})
    with pytest.raises(UserError, match=r"and r3rag-\{seed\}-exact searched different corpora"):
        measured("retrievers", {r".*-exact": two, ".*": one})
    with pytest.raises(UserError, match="rsearch-0-eval and rsearch-1-eval searched different corpora"):
        measured("rl", {"rsearch-1-eval": two, ".*": one})


def test_the_evidence_of_a_lead_is_that_of_the_least_certain_retriever():
    made = {
        r"r3rag-\d-eval": evaluation((1, 1)),
        r"r3rag-\d-exact": evaluation((1, 0)),
        "r3rag-2-bm25": evaluation((0, 0)),
        r"r3rag-\d-bm25": evaluation((1, 1)),
        "naive_rag.*": evaluation((0, 0)),
    }
    # Exact leads by 50, 50, 50; BM25 by 67 in the mean, and by nothing with one seed.
    assert measured("retrievers-lead", made).left == [1, 1, 0]


def test_unknown_claims_and_invalid_seeds_are_refused():
    with pytest.raises(UserError, match="only=magic is unknown; the claims are rl,"):
        claims_named(["rl", "magic"])
    for given in ([], ["0", "0"], ["a"]):
        with pytest.raises(UserError, match="whole numbers"):
            parse_seeds(given)
