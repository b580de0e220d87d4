"""Sums and products in the forms that are fast on CPUs equal the plain ones, forward and backward, on every platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.models import decoder as decoders
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder, rms_norm
from rrl.models.products import matmul_2d, mean_square, sum_products
from rrl.parallel.mesh import make_mesh
from rrl.parallel.rules import shard
from rrl.plan.hlo import collectives

DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])


@pytest.fixture(params=["cpu", "default"])
def platform(request, monkeypatch):
    """Runs each platform's branch of `platform_dependent` on this platform."""

    def choose(*args, default, **platforms):
        return platforms.get(request.param, default)(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", choose)


def draw(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def close(ours, plain, tolerance):
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), other, rtol=tolerance, atol=tolerance * np.abs(other).max()
        )


@pytest.mark.usefixtures("platform")
def test_sum_products_equals_the_plain_sum():
    x, y = draw(2, 3, 5, 700), draw(2, 3, 5, 700, seed=1)
    close([sum_products(x, y)], [np.sum(np.float64(x) * y, axis=-1, keepdims=True)], 1e-6)
    assert sum_products(x[0, 0, 0], y[0, 0, 0]).shape == (1,)


@pytest.mark.usefixtures("platform")
def test_mean_square_equals_the_plain_mean():
    for x in (draw(3, 5, 70), draw(70), draw(2, 40, 100)):
        close([mean_square(x)], [np.mean(np.float64(x) ** 2, axis=-1, keepdims=True)], 1e-6)
    assert mean_square(draw(0, 70)).shape == (0, 1)


@pytest.mark.parametrize("width", [32, 100, 128, 896])
def test_a_mean_squares_bits_do_not_depend_on_the_number_of_rows(width):
    x, mean = draw(256, 1, width), jax.jit(mean_square)
    for count in (1, 2, 7, 8, 16, 33, 100):
        np.testing.assert_array_equal(mean(x[:count]), mean(x)[:count])


@pytest.mark.usefixtures("platform")
@DTYPES
def test_the_gradients_of_matmul_2d_equal_the_plain_ones(dtype, tolerance):
    inputs = draw(9, 5, dtype=dtype), draw(5, 4, seed=1, dtype=dtype)
    grad = draw(9, 4, seed=2, dtype=dtype)
    out, back = jax.vjp(matmul_2d, *inputs)
    found = (out, *back(grad))
    assert all(x.dtype == dtype for x in found)
    plain, back = jax.vjp(lambda x, kernel: x @ kernel, *(x.astype(jnp.float32) for x in inputs))
    close(found, (plain, *back(grad.astype(jnp.float32))), tolerance)


@pytest.mark.usefixtures("platform")
@DTYPES
@pytest.mark.parametrize("scale_dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradients_of_rms_norm_equal_those_of_its_formula(dtype, scale_dtype, tolerance):
    def textbook(x, scale):
        return scale * x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-2)

    x, grad = draw(2, 900, 6, dtype=dtype), draw(2, 900, 6, seed=2, dtype=dtype)
    scale = draw(6, seed=1, dtype=scale_dtype)
    out, back = jax.vjp(lambda x, scale: rms_norm(x, scale, 1e-2), x, scale)
    wide = x.astype(jnp.float32), scale.astype(jnp.float32)
    plain, plain_back = jax.vjp(textbook, *wide)
    found, wanted = (out, *back(grad)), (plain, *plain_back(grad.astype(jnp.float32)))
    assert [y.dtype for y in found] == [dtype, dtype, scale_dtype]
    close(found, wanted, 1e-2 if scale_dtype == jnp.bfloat16 else tolerance)


def test_rms_norm_keeps_its_input_in_its_dtype_for_the_backward_pass():
    """A float32 copy of each layer's input would double the residuals of a bfloat16 model."""
    _, back = jax.vjp(lambda x: rms_norm(x, jnp.ones(6), 1e-6), draw(2, 9, 6, dtype=jnp.bfloat16))
    assert [x.dtype for x in jax.tree.leaves(back) if x.shape == (2, 9, 6)] == [jnp.bfloat16]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_matmul_2d_gathers_sharded_kernels_no_more_often_than_a_plain_product(remat, monkeypatch):
    config = DecoderConfig(vocab_size=64, hidden=32, layers=2, heads=4, kv_heads=4, head_dim=8, mlp=64)
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0), remat=remat))
    mesh = make_mesh(data=1, fsdp=8, tensor=1)
    tokens = jnp.ones((8, 16), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(16), tokens.shape)

    def gathers():
        def loss(params):
            return nnx.merge(graph, params)(tokens, positions=positions).sum()

        with jax.set_mesh(mesh):
            text = jax.jit(jax.grad(loss)).lower(shard(params, mesh)).compile().as_text()
        return collectives(text)["all-gather"]

    ours = gathers()
    monkeypatch.setattr(decoders, "matmul_2d", lambda x, kernel: x @ kernel)
    assert ours.count > 0 and ours == gathers()
