"""Intervals have their nominal coverage, and tests agree with closed forms and full enumeration."""

import itertools
import math

import numpy as np
import pytest

from rrl.errors import UserError
from rrl.eval.intervals import bootstrap, compare, mcnemar, permutation


def test_the_bootstrap_interval_is_near_the_normal_one_and_deterministic() -> None:
    values = (np.arange(1000) < 300).astype(float)
    found = bootstrap(values)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    assert found.mean == 0.3 and found.count == 1000
    assert found.low == pytest.approx(0.3 - half, abs=0.002)
    assert found.high == pytest.approx(0.3 + half, abs=0.002)
    assert bootstrap(values) == found
    assert bootstrap(values**2 + np.arange(1000) / 7, seed=1) != bootstrap(values**2 + np.arange(1000) / 7)
    wider = bootstrap(values, level=0.99)
    assert wider.low < found.low and wider.high > found.high


def test_intervals_have_about_their_nominal_coverage() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        found = bootstrap(rng.random(80) < 0.4, level=0.9, resamples=400, seed=seed)
        covered += found.low <= 0.4 <= found.high
    assert 0.83 <= covered / 200 <= 0.96


def test_drawing_counts_of_few_values_equals_drawing_values() -> None:
    values = np.repeat([0.0, 0.25, 1.0], [30, 20, 50])
    few = bootstrap(values)
    many = bootstrap(values + np.arange(100) * 1e-9)  # all values differ
    assert few.low == pytest.approx(many.low, abs=0.01) and few.high == pytest.approx(many.high, abs=0.01)


def test_the_block_size_does_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).random(50)
    whole = bootstrap(values, resamples=101), permutation(values - 0.5, resamples=101)
    monkeypatch.setattr("rrl.eval.intervals._BLOCK", 350)
    assert (bootstrap(values, resamples=101), permutation(values - 0.5, resamples=101)) == whole


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (8, 2), (5, 5), (30, 12)])
def test_mcnemar_equals_the_two_sided_binomial_test(better: int, worse: int) -> None:
    count = better + worse
    tail = sum(math.comb(count, k) for k in range(min(better, worse) + 1)) / 2**count
    assert mcnemar(better, worse) == pytest.approx(min(1.0, 2 * tail))
    assert mcnemar(better, worse) == mcnemar(worse, better)


def test_mcnemar_handles_many_questions() -> None:
    assert 0 < mcnemar(5300, 4700) < 1e-8


def test_the_permutation_test_approximates_the_enumeration_of_all_signs() -> None:
    change = np.array([0.5, 0.2, -0.1, 0.4, 0.0, 0.3, -0.2, 0.6])
    sums = [abs(np.dot(signs, change)) for signs in itertools.product((-1, 1), repeat=len(change))]
    exact = np.mean([value >= abs(change.sum()) - 1e-12 for value in sums])
    assert permutation(change, resamples=20_000) == pytest.approx(exact, abs=0.01)
    assert permutation(np.zeros(5)) == 1


def test_binary_values_are_compared_by_mcnemar() -> None:
    first = np.array([1, 1, 0, 0, 0, 0, 0, 0, 1, 1.0])
    second = np.array([1, 0, 1, 1, 1, 1, 1, 1, 1, 1.0])
    found = compare(first, second)
    assert (found.better, found.worse, found.same) == (6, 1, 3)
    assert found.difference == pytest.approx(0.5)
    assert found.test == "McNemar" and found.p == pytest.approx(mcnemar(6, 1))
    assert found.low <= 0.5 <= found.high
    back = compare(second, first)
    assert back.difference == -found.difference and back.p == found.p


def test_f1_values_are_compared_by_permutation() -> None:
    rng = np.random.default_rng(0)
    first = rng.random(300)
    better = compare(first, np.clip(first + rng.normal(0.05, 0.1, 300), 0, 1))
    same = compare(first, rng.permutation(first))
    assert better.test == "permutation" and better.p < 0.01 and better.low > 0
    assert same.p > 0.05 and same.low < 0 < same.high


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bootstrap([]), "no values"),
        (lambda: bootstrap([1.0, math.nan]), "value 1 is nan"),
        (lambda: bootstrap([1.0], level=1.0), r"level=1.0 must lie between 0 and 1"),
        (lambda: bootstrap([1.0], resamples=0), "resamples=0 must be at least 1"),
        (lambda: compare([1.0], [1.0, 0.0]), "the same questions in both runs; there are 1 and 2"),
    ],
)
def test_wrong_arguments_are_rejected(call, words: str) -> None:
    with pytest.raises(UserError, match=words):
        call()
