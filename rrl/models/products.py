"""Products and sums of training, the way that XLA is fast at on processors.

Of a sum of products, as the gradients of norms and softmax have them, XLA on CPU makes one loop, which takes ten times as long as
the products and then their product with ones. A product whose left side lies the wrong way, as a kernel's gradient has it, takes
half as long again as the same after that side was turned. Accelerators compile the plain expressions. Gradients are those of
`jax.grad` and `jax.vjp`, of one order; `jax.jvp` has no rule here.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ALIKE = 4096
"""From so many numbers on, XLA on CPU sums each row of them in the same order; fewer in another."""


def sum_products(x: Float[Array, "... D"], y: Float[Array, "... D"]) -> Float[Array, "... 1"]:
    """Sums of x * y over the last axis, both of one dtype."""

    def by_ones(z: Float[Array, "... D"]) -> Float[Array, "... 1"]:
        return z @ jnp.ones((z.shape[-1], 1), z.dtype)

    return jax.lax.platform_dependent(x * y, cpu=by_ones, default=lambda z: z.sum(axis=-1, keepdims=True))


def mean_square(x: Float[Array, "... D"]) -> Float[Array, "... 1"]:
    """Means of x * x over the last axis; on one CPU their bits don't depend on how many there are."""

    def mean(x: Float[Array, "... D"]) -> Float[Array, "... 1"]:
        return jnp.mean(x * x, axis=-1, keepdims=True)

    def padded(x: Float[Array, "... D"]) -> Float[Array, "... 1"]:
        flat = jnp.pad(x.reshape(-1, x.shape[-1]), ((0, -(-(ALIKE - x.size) // x.shape[-1])), (0, 0)))
        return mean(flat)[: x.size // x.shape[-1]].reshape(*x.shape[:-1], 1)

    if x.size >= ALIKE:
        return mean(x)
    return jax.lax.platform_dependent(x, cpu=padded, default=mean)


@jax.custom_vjp
def product(x: Float[Array, "T I"], kernel: Float[Array, "I O"]) -> Float[Array, "T O"]:
    """x @ kernel, both of one dtype."""
    return x @ kernel


def _product_forward(
    x: Float[Array, "T I"], kernel: Float[Array, "I O"]
) -> tuple[Float[Array, "T O"], tuple[Array, Array]]:
    return x @ kernel, (x, kernel)


def _product_backward(
    kept: tuple[Array, Array], grad: Float[Array, "T O"]
) -> tuple[Float[Array, "T I"], Float[Array, "I O"]]:
    def turned(x: Array, grad: Array) -> Array:
        return jax.lax.optimization_barrier(x.T) @ grad

    x, kernel = kept
    slope = jax.lax.platform_dependent(x, grad, cpu=turned, default=lambda x, grad: x.T @ grad)
    # With `grad @ kernel.T` the compiler gathers a sharded kernel once more, under its other name, where a layer is recomputed.
    return jax.lax.dot_general(grad, kernel, (((1,), (1,)), ((), ()))), slope


product.defvjp(_product_forward, _product_backward)
