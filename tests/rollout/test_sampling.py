"""Sampling: the correct distribution, and bits that depend on request and position only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from rrl.models.cpu.layers import can_attend, cpu_draw
from rrl.rollout.sampling import _inverse_cdf, row_keys, sample, truncate, uniform

BASE = jax.random.key(7)


def draw(logits, requests, positions, temperature=1.0, **settings):
    keys = row_keys(BASE, jnp.asarray(requests), jnp.asarray(positions))
    return sample(jnp.asarray(logits), keys, jnp.full(len(requests), temperature), **settings)


def test_a_row_does_not_depend_on_its_neighbours():
    logits = np.random.default_rng(0).normal(size=(8, 50)).astype(np.float32)
    whole, full, _drawn = draw(logits, np.arange(8), np.arange(8) + 3)
    for row in range(8):
        alone = draw(logits[row : row + 1], [row], [row + 3])
        assert int(alone[0][0]) == int(whole[row])
        assert float(alone[1][0]) == float(full[row])


def test_frequencies_follow_the_tempered_distribution():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    n = 20_000
    ids, _, drawn = draw(np.tile(logits, (n, 1)), np.arange(n), np.zeros(n, int), temperature=0.5)
    wanted = np.exp(2 * logits) / np.exp(2 * logits).sum()  # float64: chisquare checks the sum
    assert stats.chisquare(np.bincount(np.asarray(ids), minlength=4), wanted * n).pvalue > 1e-4
    np.testing.assert_allclose(np.exp(drawn), wanted[np.asarray(ids)], rtol=1e-5)


@pytest.mark.parametrize("vocabulary", [4, 128, 300, 1664])
def test_a_sample_inverts_the_cumulative_distribution(vocabulary):
    draws = np.random.default_rng(vocabulary)
    weights = draws.exponential(size=(500, vocabulary)) * (draws.random((500, vocabulary)) < 0.3)
    weights[:, draws.integers(vocabulary)] += 1e-3
    probabilities = weights / weights.sum(-1, keepdims=True)
    uniform = draws.random(500)
    uniform[:20], uniform[20:40] = 0.0, np.nextafter(np.float32(1), np.float32(0))
    tokens = np.asarray(
        _inverse_cdf(jnp.asarray(probabilities, jnp.float32), jnp.asarray(uniform, jnp.float32))
    )
    ends = np.cumsum(probabilities, axis=-1)
    places = np.arange(500), tokens
    assert (probabilities[places] > 0).all()
    assert (ends[places] >= uniform - 1e-6).all()
    assert ((ends - probabilities)[places] <= uniform + 1e-6).all()


def test_the_cpu_kernel_samples_the_same_tokens():
    """With equal random numbers, the kernel changes only the last bits of probabilities."""
    if not can_attend(jnp.float32, 16):
        pytest.skip("this machine has no C++ compiler")
    draws = np.random.default_rng(5)
    hidden, table = (jnp.asarray(draws.normal(size=shape), jnp.float32) for shape in ((300, 16), (16, 416)))
    temperature = jnp.asarray(draws.choice([0.0, 0.4, 1.0], 300), jnp.float32)
    keys = row_keys(BASE, jnp.arange(300), jnp.arange(300))
    ours, theirs = (
        cpu_draw(hidden, table, uniform(keys), temperature),
        sample(hidden @ table, keys, temperature),
    )
    np.testing.assert_array_equal(ours[0], theirs[0])
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_full_log_probability_ignores_temperature_and_truncation():
    logits = np.random.default_rng(1).normal(size=(64, 20)).astype(np.float32)
    ids, full, _ = draw(logits, np.arange(64), np.zeros(64, int), temperature=0.3, top_p=0.5)
    wanted = jax.nn.log_softmax(logits)[np.arange(64), np.asarray(ids)]
    np.testing.assert_allclose(full, wanted, rtol=1e-5)


def test_temperature_zero_is_greedy_with_log_probability_zero():
    logits = np.random.default_rng(2).normal(size=(9, 20)).astype(np.float32)
    ids, _, drawn = draw(logits, np.arange(9), np.zeros(9, int), temperature=0.0)
    assert np.array_equal(ids, logits.argmax(-1))
    assert np.all(np.asarray(drawn) == 0)


def test_greedy_takes_the_first_of_equal_logits_and_the_last_token_for_nan():
    logits = np.random.default_rng(3).integers(0, 3, (9, 20)).astype(np.float32)
    logits[0] = -np.inf
    assert np.array_equal(draw(logits, np.arange(9), np.zeros(9, int), temperature=0.0)[0], logits.argmax(-1))
    logits[4] = np.nan
    assert draw(logits, np.arange(9), np.zeros(9, int), temperature=0.0)[0][4] == 19


def test_greedy_rows_do_not_depend_on_sampled_rows_beside_them():
    logits = np.random.default_rng(5).normal(size=(6, 40)).astype(np.float32)
    keys = row_keys(BASE, jnp.arange(6), jnp.arange(6))
    alone = sample(jnp.asarray(logits), keys, jnp.zeros(6), top_p=0.9)
    beside = sample(jnp.asarray(logits), keys, jnp.asarray([0.0, 0, 0, 1, 1, 1]), top_p=0.9)
    for some, others in zip(alone, beside, strict=True):
        assert np.array_equal(some[:3], others[:3])
    drawn = sample(jnp.asarray(logits), keys, jnp.ones(6), top_p=0.9)
    for some, others in zip(drawn, beside, strict=True):
        assert np.array_equal(some[3:], others[3:])


def test_truncation_keeps_the_smallest_set_with_the_mass_and_the_top_k():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]]))
    assert np.isfinite(truncate(logits, top_p=0.79)).tolist() == [[True, True, False, False]]
    assert np.isfinite(truncate(logits, top_p=0.81)).tolist() == [[True, True, True, False]]
    assert np.isfinite(truncate(logits, top_k=1)).tolist() == [[True, False, False, False]]
    ids, _, _ = draw(np.tile(logits, (500, 1)), np.arange(500), np.zeros(500, int), top_k=2)
    assert set(np.asarray(ids).tolist()) == {0, 1}


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.95, 0.999])
def test_top_p_keeps_what_a_sort_would_keep(top_p):
    rng = np.random.default_rng(int(1000 * top_p))
    logits = np.concatenate([rng.normal(size=(40, 300)) * scale for scale in (0.1, 1.0, 8.0)]).astype(
        np.float32
    )
    ordered = np.sort(logits.astype(np.float64), axis=-1)[:, ::-1]
    weights = np.exp(ordered - ordered[:, :1])
    mass = np.cumsum(weights / weights.sum(-1, keepdims=True), axis=-1)
    clear = (np.abs(mass - top_p) > 1e-5).all(-1)  # for other rows rounding decides
    wanted = logits >= np.take_along_axis(ordered, (mass < top_p).sum(-1)[:, None], axis=-1)
    assert clear.sum() > 100
    assert (np.isfinite(truncate(logits, top_p=top_p)) == wanted)[clear].all()
