"""Products and sums for training, in forms that XLA compiles to fast code on CPUs.

XLA on CPU compiles a sum of products, as in the gradients of norms and softmax, to a single loop. It takes ten times as long as
the products followed by a matrix product with ones. A matrix product with a transposed left side, as in a kernel's gradient,
takes 1.5 times as long as with a copy that was transposed first. Accelerators compile the plain expressions. `matmul_2d` has no
forward-mode derivative (`jax.jvp`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MIN_STABLE_SIZE = 4096
"""Number of elements. For arrays of at least this size, XLA on CPU sums each row in an order that does not depend on the number
of rows."""


def sum_products(x: Float[Array, "... D"], y: Float[Array, "... D"]) -> Float[Array, "... 1"]:
    """Sum of x * y over the last axis; x and y have the same dtype."""

    def multiply_ones(z: Float[Array, "... D"]) -> Float[Array, "... 1"]:
        return z @ jnp.ones((z.shape[-1], 1), z.dtype)

    return jax.lax.platform_dependent(
        x * y, cpu=multiply_ones, default=lambda z: z.sum(axis=-1, keepdims=True)
    )


def mean_square(x: Float[Array, "... D"]) -> Float[Array, "... 1"]:
    """Mean of x * x over the last axis. On a single CPU device a row's result is bitwise independent of the number of rows."""

    def mean(x: Float[Array, "... D"]) -> Float[Array, "... 1"]:
        return jnp.mean(x * x, axis=-1, keepdims=True)

    def padded(x: Float[Array, "... D"]) -> Float[Array, "... 1"]:
        flat = jnp.pad(
            x.reshape(-1, x.shape[-1]), ((0, -(-(MIN_STABLE_SIZE - x.size) // x.shape[-1])), (0, 0))
        )
        return mean(flat)[: x.size // x.shape[-1]].reshape(*x.shape[:-1], 1)

    if x.size >= MIN_STABLE_SIZE:
        return mean(x)
    return jax.lax.platform_dependent(x, cpu=padded, default=mean)


@jax.custom_vjp
def matmul_2d(x: Float[Array, "T I"], kernel: Float[Array, "I O"]) -> Float[Array, "T O"]:
    """x @ kernel; x and kernel have the same dtype."""
    return x @ kernel


def _matmul_forward(
    x: Float[Array, "T I"], kernel: Float[Array, "I O"]
) -> tuple[Float[Array, "T O"], tuple[Array, Array]]:
    return x @ kernel, (x, kernel)


def _matmul_backward(
    residuals: tuple[Array, Array], grad: Float[Array, "T O"]
) -> tuple[Float[Array, "T I"], Float[Array, "I O"]]:
    def transpose_first(x: Array, grad: Array) -> Array:
        return jax.lax.optimization_barrier(x.T) @ grad

    x, kernel = residuals
    kernel_grad = jax.lax.platform_dependent(x, grad, cpu=transpose_first, default=lambda x, grad: x.T @ grad)
    # With `grad @ kernel.T`, a recomputed layer (remat) would gather a sharded kernel a second time, as its transpose.
    return jax.lax.dot_general(grad, kernel, (((1,), (1,)), ((), ()))), kernel_grad


matmul_2d.defvjp(_matmul_forward, _matmul_backward)
