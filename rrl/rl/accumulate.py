"""Gradient accumulation: sums gradients over microbatches, divides once, and takes one optimiser step."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from rrl.parallel.mesh import put_rows
from rrl.parallel.rules import constrain_state
from rrl.parallel.threads import map_in_threads, parallel_microbatches_on
from rrl.rl.batch import Batch
from rrl.rl.optim import skipped_updates

Loss = Callable[[PyTree, PyTree, Batch], tuple[jax.Array, dict[str, jax.Array]]]
"""(trained parameters, frozen, microbatch) -> (loss summed over tokens, other sums by name).

Here `frozen` is a pytree of all other arrays that the loss uses. They get no gradient.
"""


class GradientAccumulator:
    """Three jitted programs for one optimiser step over several microbatches. Read `step` first.

    `accumulate` adds the gradient and the metrics of one microbatch to running sums. `add` adds the running sums of two
    threads. `apply` divides the gradient sum and takes the optimiser step.

    On a mesh of several devices, rows are split over the axes data and fsdp. Gradients and optimiser state are sharded
    like their parameters (`rrl.parallel.rules`). Call `step` within `use_mesh`.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        sum_names: Sequence[str],
        mesh: Mesh | None = None,
        parallel_microbatches: int = 1,
    ) -> None:
        """Builds the programs; nothing is compiled yet.

        Args:
          loss: see `Loss`.
          optimizer: its state must count skipped updates (`rrl.rl.optim.make_optimizer`).
          sum_names: names of the sums that `loss` returns.
          mesh: devices; None: the default device.
          parallel_microbatches: see `ObjectiveConfig`.
        """
        self.mesh = mesh
        self.sum_names = (*sum_names, "loss")
        self.parallel_microbatches = parallel_microbatches_on(mesh, parallel_microbatches)

        def accumulate(
            params: PyTree, frozen: PyTree, grads: PyTree, sums: dict[str, jax.Array], batch: Batch
        ) -> tuple[PyTree, dict[str, jax.Array]]:
            (value, batch_sums), grad = jax.value_and_grad(loss, has_aux=True)(params, frozen, batch)
            batch_sums, grad = batch_sums | {"loss": value}, constrain_state(grad)
            sums = {name: sums[name] + batch_sums[name] for name in batch_sums}
            return jax.tree.map(jnp.add, grads, grad), sums

        def apply(
            params: PyTree, opt_state: optax.OptState, grads: PyTree, divisor: jax.Array
        ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
            grads = jax.tree.map(lambda g: (g / divisor).astype(g.dtype), grads)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            metrics = {"grad_norm": optax.global_norm(grads), "skipped": skipped_updates(opt_state)}
            return optax.apply_updates(params, updates), opt_state, metrics

        self.accumulate: Callable[..., Any] = jax.jit(accumulate, donate_argnums=(2, 3))
        self.apply: Callable[..., Any] = jax.jit(apply, donate_argnums=(0, 1))
        self.add: Callable[..., Any] = jax.jit(lambda *parts: jax.tree.map(jnp.add, *parts), donate_argnums=0)

    def step(
        self,
        params: PyTree,
        opt_state: optax.OptState,
        frozen: PyTree,
        batches: Sequence[Batch],
        divisor: float,
    ) -> tuple[PyTree, optax.OptState, dict[str, float]]:
        """Takes one optimiser step on the loss summed over `batches` and divided by `divisor`.

        Donates `params` and `opt_state`. `frozen` is the second argument of the loss (`Loss`).

        Returns:
          New parameters, new optimiser state, and metrics: the sums by name, "loss" divided by `divisor`, "grad_norm", and
          "skipped" (updates skipped since the start because their gradient was not finite).
        """
        # The initial zeros have the same sharding as the outputs of `accumulate`. Otherwise its second call would compile again.
        sharding = jax.tree.leaves(params)[0].sharding
        replicated = (
            NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
        )
        threads = min(self.parallel_microbatches, len(batches)) or 1
        shares = [batches[first::threads] for first in range(threads)]

        def zeros() -> tuple[PyTree, dict[str, jax.Array]]:
            grads = jax.tree.map(lambda x: jnp.zeros_like(x, device=x.sharding), params)
            return grads, {name: jnp.zeros((), device=replicated) for name in self.sum_names}

        def accumulate_share(carry: tuple[PyTree, dict[str, jax.Array]], share: Sequence[Batch]) -> Any:
            for batch in share:
                carry = self.accumulate(params, frozen, *carry, put_rows(batch, self.mesh))
                # Each thread waits for its own result. If it only queued programs, the CPU device would run those of all threads
                # one after another.
                if threads > 1:
                    jax.block_until_ready(carry[1])
            return carry

        partial = map_in_threads(threads, accumulate_share, [zeros() for _ in shares], shares)
        grads, sums = partial[0]
        for part in partial[1:]:
            grads, sums = self.add((grads, sums), part)
        params, opt_state, extra = self.apply(params, opt_state, grads, jnp.float32(divisor))
        metrics = {name: float(value) for name, value in jax.device_get({**sums, **extra}).items()}
        return params, opt_state, metrics | {"loss": metrics["loss"] / divisor}
