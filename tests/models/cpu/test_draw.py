"""The CPU kernel samples tokens like `rrl.rollout.sampling.sample`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from rrl.models.cpu.layers import cpu_draw
from rrl.rollout.sampling import sample, truncate, uniform


def sampling_inputs(rows, width, vocabulary, seed=0):
    """Hidden states, a table with a peaked distribution, uniform numbers, and temperatures, some of them 0."""
    draw = np.random.default_rng(seed)
    hidden, table = (
        draw.normal(size=(rows, width)),
        3 * draw.normal(size=(width, vocabulary)) / np.sqrt(width),
    )
    temperature = draw.choice([0.0, 0.1, 0.7, 1.0, 1.7], rows)
    return [jnp.asarray(part, jnp.float32) for part in (hidden, table, draw.random(rows), temperature)]


def log_softmax(logits):
    """log_softmax in float64."""
    logits = np.asarray(logits, np.float64)
    return logits - scipy.special.logsumexp(logits, axis=-1, keepdims=True)


@pytest.mark.parametrize(("rows", "width", "vocabulary"), [(200, 32, 416), (40, 128, 1664), (3, 64, 16)])
def test_sampling_inverts_the_cumulative_distribution(compiled, rows, width, vocabulary):
    hidden, table, uniform, temperature = sampling_inputs(rows, width, vocabulary)
    edges = uniform.at[:8].set(0.0).at[8:16].set(np.nextafter(np.float32(1), np.float32(0)))
    ids, full, drawn = (np.asarray(part) for part in cpu_draw(hidden, table, edges, temperature))
    logits, places = np.asarray(hidden, np.float64) @ np.asarray(table, np.float64), np.arange(rows)
    np.testing.assert_allclose(full, log_softmax(logits)[places, ids], rtol=1e-5, atol=1e-5)
    heat = np.asarray(temperature)
    assert np.array_equal(ids[heat == 0], logits.argmax(-1)[heat == 0]) and not np.any(drawn[heat == 0])
    scaled = log_softmax(logits / np.where(heat > 0, heat, 1.0)[:, None])
    ends = np.cumsum(np.exp(scaled), axis=-1)
    begins, at, hot = ends - np.exp(scaled), np.asarray(edges), heat > 0
    np.testing.assert_allclose(drawn[hot], scaled[places, ids][hot], rtol=2e-5, atol=2e-5)
    assert (begins[places, ids] <= at + 1e-6)[hot].all() and (ends[places, ids] >= at - 1e-6)[hot].all()


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "top_k": 30}])
def test_a_sampled_token_depends_only_on_its_row(compiled, options):
    given = sampling_inputs(50, 256, 1040)  # a table that is large enough to be packed
    whole = cpu_draw(*given, **options)
    for part, threaded in zip(whole, cpu_draw(*given, **options, threads=4), strict=True):
        np.testing.assert_array_equal(part, threaded)
    hidden, table, *rest = given
    for some in (slice(7, 8), slice(20, 23)):
        alone = cpu_draw(hidden[some], table, *(part[some] for part in rest), **options)
        for part, own in zip(whole, alone, strict=True):
            np.testing.assert_array_equal(part[some], own)


def test_tokens_with_probability_0_are_never_sampled_and_nan_gives_nan(compiled):
    table = jnp.full((16, 400), -200.0).at[:, jnp.array([137, 139])].set(0.0).at[:, 300].set(-0.05)
    hidden = jnp.ones((4, 16)).at[3, 2].set(jnp.nan)
    low, high = 0.0, float(np.nextafter(np.float32(1), np.float32(0)))
    ids, full, drawn = cpu_draw(
        hidden, table, jnp.array([low, high, 0.5, 0.5]), jnp.array([1.0, 1.0, 0.0, 1.0])
    )
    assert np.asarray(ids)[:3].tolist() == [137, 300, 137]
    assert np.isfinite(np.asarray(full)[:3]).all() and np.isnan([full[3], drawn[3]]).all()


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 3}])
@pytest.mark.parametrize(
    ("logit", "finite"), [(np.nan, False), (-np.nan, False), (np.inf, False), (-np.inf, True), (0.0, True)]
)
@pytest.mark.parametrize("place", [0, 39, 47])
def test_rows_that_are_no_distribution_give_non_finite_log_probabilities(
    compiled, options, logit, finite, place
):
    table = jnp.asarray(np.random.default_rng(0).normal(size=(16, 48)), jnp.float32).at[0, place].set(logit)
    hidden, heat = jnp.ones((4, 16)), jnp.array([1.0, 0.5, 1.5, 0.0])
    keys = jax.random.split(jax.random.key(0), 4)
    for drawn in (
        cpu_draw(hidden, table, uniform(keys), heat, **options),
        sample(hidden @ table, keys, heat, **options),
    ):
        ids, full, as_drawn = (np.asarray(part) for part in drawn)
        assert ((ids >= 0) & (ids < 48)).all()
        assert (np.isfinite(full) & np.isfinite(as_drawn) == finite).all()
    nothing = jnp.full((16, 48), -jnp.inf)
    for drawn in (cpu_draw(hidden, nothing, uniform(keys), heat), sample(hidden @ nothing, keys, heat)):
        assert not np.isfinite(drawn[1]).any()


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.95},
        {"top_p": 0.5, "top_k": 7},
        {"top_p": 1e-6},
        {"top_p": float(np.nextafter(np.float32(1), np.float32(0)))},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 1663},
        {"top_k": 2**31 - 1},
    ],
)
@pytest.mark.parametrize("vocabulary", [1664, 8320])
def test_top_p_and_top_k_equal_those_of_xla(compiled, options, vocabulary):
    check_equals_sample(sampling_inputs(100, 64, vocabulary), options)


def check_equals_sample(given, options):
    """Checks that the CPU kernel samples the same tokens as `sample`, with the same top-p and top-k."""
    hidden, table, _, temperature = given
    keys, logits = jax.random.split(jax.random.key(1), len(hidden)), hidden @ table
    ids, full, drawn = cpu_draw(hidden, table, uniform(keys), temperature, **options)
    known = options | {"top_k": min(options.get("top_k", 0), table.shape[1])}
    their_ids, their_full, their_drawn = sample(logits, keys, temperature, **known)
    same = np.asarray(ids == their_ids)
    assert same.mean() > 0.98  # rounding decides if the uniform number is at the border of two tokens
    np.testing.assert_allclose(full[same], their_full[same], rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(drawn[same], their_drawn[same], rtol=1e-5, atol=3e-5)
    heat = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    assert (truncate(logits / heat, **known)[np.arange(len(ids)), ids] > -jnp.inf).all()


def test_ties_are_kept_together_and_nan_rows_stay_nan(compiled):
    table = jnp.full((16, 48), -3.0).at[:, 5].set(0.0).at[:, jnp.array([9, 20, 33])].set(-0.125)
    hidden = jnp.ones((64, 16)).at[63, 2].set(jnp.nan)
    given = hidden, table, jnp.arange(64) / 64, jnp.ones(64)
    for options, wanted in (
        ({"top_k": 2}, {5, 9, 20, 33}),
        ({"top_p": 0.8}, {5, 9, 20, 33}),
        ({"top_p": 0.7}, {5}),
    ):
        ids, _, drawn = cpu_draw(*given, **options)
        assert set(np.asarray(ids[:63]).tolist()) == wanted and np.isnan(drawn[63])
        share = np.bincount(np.asarray(ids[:63]), minlength=48) / 63
        np.testing.assert_allclose(np.exp(np.asarray(drawn[:63])), share[np.asarray(ids[:63])], atol=0.02)
