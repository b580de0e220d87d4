"""Sums and products that XLA is fast at on processors equal the plain ones, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrl.models.decoder import rms_norm
from rrl.models.products import product, sum_products, sum_rows


def draw(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def test_sums_equal_the_plain_ones():
    x, y = draw(2, 3, 5, 7), draw(2, 3, 5, 7, seed=1)
    np.testing.assert_allclose(sum_products(x, y), (x * y).sum(-1, keepdims=True), atol=1e-5)
    np.testing.assert_allclose(sum_rows(x), x.sum((0, 1, 2)), atol=1e-5)
    np.testing.assert_allclose(sum_rows(x[0, 0, 0]), x[0, 0, 0], atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_gradients_of_a_product_are_the_plain_ones(dtype, tolerance):
    inputs = draw(9, 5, dtype=dtype), draw(5, 4, seed=1, dtype=dtype)
    grad = draw(9, 4, seed=2, dtype=dtype)
    out, back = jax.vjp(product, *inputs)
    found = (out, *back(grad))
    assert all(x.dtype == dtype for x in found)
    plain, back = jax.vjp(lambda x, kernel: x @ kernel, *(x.astype(jnp.float32) for x in inputs))
    for one, other in zip(found, (plain, *back(grad.astype(jnp.float32))), strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_gradients_of_the_norm_are_those_of_its_formula(dtype, tolerance):
    def textbook(x, scale):
        return scale * x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-2)

    x, scale, grad = draw(2, 9, 6, dtype=dtype), draw(6, seed=1), draw(2, 9, 6, seed=2, dtype=dtype)
    out, back = jax.vjp(lambda x, scale: rms_norm(x, scale, 1e-2), x, scale)
    wide = x.astype(jnp.float32)
    plain, plain_back = jax.vjp(textbook, wide, scale)
    found, wanted = (out, *back(grad)), (plain, *plain_back(grad.astype(jnp.float32)))
    assert [y.dtype for y in found] == [dtype, dtype, jnp.float32]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=tolerance, atol=tolerance)
