"""Bootstrap intervals of a metric over questions, and paired tests between two runs on the same questions.

Everything is seeded, so the same values give the same results. Questions are the unit that is resampled. For the spread over
training seeds use `student`.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from rrl.errors import UserError

RESAMPLES = 10_000
_BLOCK = 2_000_000
"""Random numbers drawn at once. It bounds the memory to some tens of MB, whatever the number of questions."""

Values = Sequence[float] | Float[np.ndarray, "Q"]
"""One value per question, in the same order for both runs of a pair."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval, by bootstrap or by Student's t."""

    mean: float
    low: float
    high: float
    count: int
    """Number of questions, or of seeds."""


@dataclasses.dataclass(frozen=True)
class PairedComparison:
    """A paired comparison of a second run with a first on the same questions."""

    difference: float
    """Mean of the second run less the mean of the first."""
    low: float
    high: float
    """Bounds `low` and `high` of the difference's bootstrap interval."""
    p: float
    """Two-sided p-value of the difference, under the hypothesis that the runs are equally good."""
    test: str
    """"McNemar" (exact test) if all values are 0 or 1, else "permutation" (of signs)."""
    better: int
    worse: int
    same: int
    """Numbers of questions on which the second run scores higher (`better`), lower (`worse`) or the same."""


def bootstrap(values: Values, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return the mean of `values` and its percentile bootstrap interval (Efron & Tibshirani, 1993, chapter 13).

    Raises UserError for no values, values that are not finite, or settings out of range.
    """
    array = _checked(values, level, resamples)
    low, high = _percentiles(_resampled_means(array, resamples, seed), level)
    return Interval(float(array.mean()), low, high, len(array))


def student(values: Values, *, level: float = 0.95) -> Interval:
    """Return the mean of a few values, such as one per training seed, and its interval by Student's t (1908).

    Raises UserError for fewer than two values, and as `bootstrap` does.
    """
    array = _checked(values, level, 1)
    if len(array) < 2:
        raise UserError(f"{len(array)} value: an interval over seeds needs two or more")
    import scipy.stats  # takes a second to import

    half_width = scipy.stats.t.ppf((1 + level) / 2, len(array) - 1) * array.std(ddof=1) / np.sqrt(len(array))
    return Interval(
        float(array.mean()), float(array.mean() - half_width), float(array.mean() + half_width), len(array)
    )


def compare(
    first: Values, second: Values, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> PairedComparison:
    """Compare two runs by question: interval by bootstrap over questions, p by McNemar's exact test or a permutation test.

    Raises UserError for runs of unequal length, and as `bootstrap` does.
    """
    first_values, second_values = _checked(first, level, resamples), _checked(second, level, resamples)
    if len(first_values) != len(second_values):
        raise UserError(
            f"a paired test needs the same questions in both runs; there are {len(first_values)} and {len(second_values)}"
        )
    change = second_values - first_values
    low, high = _percentiles(_resampled_means(change, resamples, seed), level)
    better, worse = int((change > 0).sum()), int((change < 0).sum())
    binary = bool(np.isin(first_values, (0, 1)).all() and np.isin(second_values, (0, 1)).all())
    return PairedComparison(
        difference=float(change.mean()),
        low=low,
        high=high,
        p=mcnemar(better, worse) if binary else permutation(change, resamples=resamples, seed=seed),
        test="McNemar" if binary else "permutation",
        better=better,
        worse=worse,
        same=len(change) - better - worse,
    )


def mcnemar(better: int, worse: int) -> float:
    """Return the two-sided exact p of McNemar's test (1947): a fair coin for each question on which the runs differ."""
    count, fewer = better + worse, min(better, worse)
    term = total = 1
    for k in range(fewer):
        term = term * (count - k) // (k + 1)
        total += term
    return min(1.0, 2 * total / 2**count)


def permutation(change: Values, *, resamples: int = RESAMPLES, seed: int = 0) -> float:
    """Return the two-sided p of the mean change if each question's two values are swapped at random (Fisher's sign-flip test).

    The observed signs count as one of the draws, so that p is never 0 (Phipson & Smyth, 2010). Raises as `bootstrap` does.
    """
    array = _checked(change, 0.95, resamples)
    # Only the count of each absolute value matters: the number of positive signs among n equal ones is binomial.
    sizes, counts = np.unique(np.abs(array[array != 0]), return_counts=True)
    flipped = _draw_in_blocks(
        lambda rng, rows: (2.0 * rng.binomial(counts, 0.5, (rows, len(counts))) - counts) @ sizes,
        len(sizes),
        resamples,
        seed,
    )
    # Sums of the same numbers in another order differ in their last bits.
    slack = 1e-9 * max(1.0, float(sizes @ counts))
    extreme = (np.abs(flipped) >= abs(array.sum()) - slack).sum()
    return float((extreme + 1) / (resamples + 1))


def _resampled_means(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    count = len(values)
    distinct, frequencies = np.unique(values, return_counts=True)
    if len(distinct) * 4 <= count:
        # For few distinct values, draw how often each occurs: the counts are multinomial.
        shares = frequencies / count
        return _draw_in_blocks(
            lambda rng, rows: rng.multinomial(count, shares, rows) @ distinct / count,
            len(distinct),
            resamples,
            seed,
        )
    return _draw_in_blocks(
        lambda rng, rows: values[rng.integers(0, count, (rows, count))].mean(1), count, resamples, seed
    )


def _draw_in_blocks(
    draw: Callable[[np.random.Generator, int], np.ndarray], width: int, resamples: int, seed: int
) -> np.ndarray:
    """Return `resamples` draws, made in blocks to bound the memory. One draw takes `width` random numbers."""
    rng = np.random.default_rng(seed)
    rows = max(1, _BLOCK // max(width, 1))
    return np.concatenate([draw(rng, min(rows, resamples - at)) for at in range(0, resamples, rows)])


def _percentiles(means: np.ndarray, level: float) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _checked(values: Values, level: float, resamples: int) -> np.ndarray:
    if not 0 < level < 1:
        raise UserError(f"level={level} must lie between 0 and 1, such as 0.95")
    if resamples < 1:
        raise UserError(f"resamples={resamples} must be at least 1")
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not len(array):
        raise UserError("no values: an interval needs the metric of one question or more")
    if not np.isfinite(array).all():
        at = int(np.flatnonzero(~np.isfinite(array))[0])
        raise UserError(
            f"value {at} is {array[at]}: leave out the questions on which the metric is not defined"
        )
    return array
