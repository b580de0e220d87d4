"""Products with packed weights equal those in float64, to the rounding of their format."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from rrl.models.cpu.layers import cpu_draw
from rrl.models.cpu.packed import BITS, pack, pack_decoder, packed_bytes, supports_format
from tests.models.cpu.test_layers import SHAPES, caches
from tests.models.small import draw, extend, make, places

FORMATS = tuple(BITS)


@pytest.fixture(params=FORMATS)
def name(request, compiled):
    """Each packed format that this processor supports."""
    if not supports_format(request.param):
        pytest.skip(f"this processor does not multiply {request.param}")
    return request.param


def rounded(matrix, name, axis):
    """A float64 copy of a matrix, rounded to a format; int8 has one scale along `axis`."""
    matrix = np.asarray(matrix, np.float64)
    if name == "float32":
        return matrix
    if name == "bfloat16":
        return matrix.astype(ml_dtypes.bfloat16).astype(np.float64)
    scale = np.abs(matrix).max(axis, keepdims=True) / 127
    return np.rint(matrix / np.where(scale > 0, scale, 1)) * scale


def distance(found, wanted):
    """Root mean square of the difference, relative to that of `wanted`."""
    found, wanted = (np.asarray(part, np.float64) for part in (found, wanted))
    return np.sqrt(((found - wanted) ** 2).mean() / (wanted**2).mean())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "inner", "width"), [(1, 16, 16), (3, 64, 80), (13, 256, 1040), (40, 896, 112)]
)
def test_products_equal_those_of_rounded_numbers(name, rows, inner, width, transposed):
    """Greedy sampling gives the log-probability of the best token, which depends on all products of its row."""
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.normal(size=(rows, inner)), jnp.float32)
    table = jnp.asarray(random.normal(size=(inner, width)) / np.sqrt(inner), jnp.float32)
    packed = pack((table.T if transposed else table)[None], name, transposed=transposed)
    assert packed.data.shape == (1, packed_bytes(inner, width, name))
    ids, logps, _ = cpu_draw(hidden, packed, jnp.zeros(rows), jnp.zeros(rows))
    logits = rounded(hidden, name, 1) @ rounded(table, name, 0)
    highest = logits.max(1)
    np.testing.assert_array_equal(ids, logits.argmax(1))
    wanted = -np.log(np.exp(logits - highest[:, None]).sum(1))
    np.testing.assert_allclose(logps, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_with_packed_weights_equal_those_of_xla(name, shape):
    config = SHAPES[shape]
    tokens, rows, slots = draw(config, 4, 70), jnp.array([3, 0, 3, 1]), 250
    at = places(4, 70) + jnp.array([20, 0, 90, slots - 70])[:, None]
    ours, theirs = caches(config, 5, slots)
    packed = nnx.clone(make(config))
    pack_decoder(packed, name)
    (found, cache), (wanted, other) = (
        extend(packed, tokens, at, ours, rows),
        extend(make(config), tokens, at, theirs, rows),
    )
    real = np.asarray(at < slots)
    if name == "bfloat16":  # at most as far as if all numbers were bfloat16
        half, _ = extend(make(config, dtype=jnp.bfloat16), tokens, at, caches(config, 5, slots)[1], rows)
        largest = distance(half[real], wanted[real])
    else:
        largest = {"float32": 5e-6, "int8": 0.1}[name]
    for some, all_float32 in ((found[real], wanted[real]), (cache.k, other.k), (cache.v, other.v)):
        assert distance(some, all_float32) < largest


def test_a_tokens_bits_depend_only_on_its_past_with_packed_weights(name):
    config = SHAPES["large"]
    decoder, tokens = nnx.clone(make(config)), draw(config, 9, 60)
    pack_decoder(decoder, name)
    (whole, ours), (threaded, _) = (
        extend(decoder, tokens, places(9, 60), caches(config, 9, 60, threads)[0]) for threads in (1, 4)
    )
    np.testing.assert_array_equal(threaded, whole)
    cache, rows = caches(config, 9, 60)[0], jnp.array([4, 2])
    for first, last in ((0, 37), (37, 38), (38, 60)):
        some = slice(first, last)
        hidden, cache = extend(decoder, tokens[rows, some], places(2, 60)[:, some], cache, rows)
        np.testing.assert_array_equal(hidden, whole[rows, some])
    np.testing.assert_array_equal(cache.k[:, :, rows], ours.k[:, :, rows])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_inputs_that_are_not_finite_give_non_finite_log_probabilities(name, value):
    table = jnp.asarray(np.random.default_rng(0).normal(size=(1, 32, 48)), jnp.float32)
    hidden = jnp.ones((3, 32)).at[1, 5].set(value)
    _, logps, _ = cpu_draw(hidden, pack(table, name), jnp.full(3, 0.5), jnp.ones(3))
    assert np.isfinite(logps).tolist() == [True, False, True]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_give_non_finite_log_probabilities(name, value):
    table = (
        jnp.asarray(np.random.default_rng(0).normal(size=(1, 32, 48)), jnp.float32).at[0, 7, 20].set(value)
    )
    _, logps, _ = cpu_draw(jnp.ones((3, 32)), pack(table, name), jnp.full(3, 0.5), jnp.ones(3))
    assert not np.isfinite(logps).any()


def test_zero_columns_and_zero_rows_give_zero(name):
    table = jnp.zeros((1, 32, 48))
    _, logps, _ = cpu_draw(jnp.zeros((2, 32)).at[1].set(1.0), pack(table, name), jnp.zeros(2), jnp.ones(2))
    np.testing.assert_allclose(logps, -np.log(48), rtol=1e-6)


def test_sizes_that_are_no_multiples_of_16_are_refused(name):
    with pytest.raises(ValueError, match="24 x 48 cannot be packed: both must be multiples of 16"):
        pack(jnp.zeros((1, 24, 48)), name)
