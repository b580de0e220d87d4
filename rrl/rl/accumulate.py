"""Gradients summed over microbatches and divided once, then one optimiser step."""

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
"""(trained parameters, frozen ones, a microbatch) -> the summed loss, and sums by name."""


class GradientAccumulator:
    """Two jitted programs: `accumulate` adds a microbatch's gradient to the sum, `apply` takes the optimiser's step.

    With a mesh of several devices, rows are split over its axes data and fsdp, and everything that is shaped like a
    parameter lies where `rrl.parallel.rules` puts that. Call it within `use_mesh`.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        sums: Sequence[str],
        mesh: Mesh | None = None,
        parallel_microbatches: int = 1,
    ) -> None:
        """`sums` are the names that `loss` returns; `streams` is as in `ObjectiveConfig`."""
        self.mesh = mesh
        self.sums = (*sums, "loss")
        self.parallel_microbatches = parallel_microbatches_on(mesh, parallel_microbatches)

        def accumulate(
            params: PyTree, frozen: PyTree, grads: PyTree, sums: dict[str, jax.Array], batch: Batch
        ) -> tuple[PyTree, dict[str, jax.Array]]:
            (value, new), grad = jax.value_and_grad(loss, has_aux=True)(params, frozen, batch)
            new, grad = new | {"loss": value}, constrain_state(grad)
            return jax.tree.map(jnp.add, grads, grad), {name: sums[name] + new[name] for name in new}

        def apply(
            params: PyTree, opt_state: optax.OptState, grads: PyTree, total: jax.Array
        ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
            grads = jax.tree.map(lambda g: (g / total).astype(g.dtype), grads)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            metrics = {"grad_norm": optax.global_norm(grads), "skipped": skipped_updates(opt_state)}
            return optax.apply_updates(params, updates), opt_state, metrics

        self.accumulate: Callable[..., Any] = jax.jit(accumulate, donate_argnums=(2, 3))
        self.apply: Callable[..., Any] = jax.jit(apply, donate_argnums=(0, 1))
        self.join: Callable[..., Any] = jax.jit(
            lambda *parts: jax.tree.map(jnp.add, *parts), donate_argnums=0
        )

    def step(
        self,
        params: PyTree,
        opt_state: optax.OptState,
        frozen: PyTree,
        batches: Sequence[Batch],
        total: float,
    ) -> tuple[PyTree, optax.OptState, dict[str, float]]:
        """One optimiser step on the loss summed over `batches` and divided by `total`; donates `params` and `opt_state`.

        Returns new parameters, optimiser state, and the sums, with "loss" divided by `total`, "grad_norm", and "skipped"
        (steps without a finite gradient since the start).
        """
        # Zeros lie where `accumulate` returns them: from anywhere else the first call would compile it a second time.
        place = jax.tree.leaves(params)[0].sharding
        whole = NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else place
        streams = min(self.parallel_microbatches, len(batches)) or 1
        shares = [batches[first::streams] for first in range(streams)]

        def zeros() -> tuple[PyTree, dict[str, jax.Array]]:
            grads = jax.tree.map(lambda x: jnp.zeros_like(x, device=x.sharding), params)
            return grads, {name: jnp.zeros((), device=whole) for name in self.sums}

        def add(held: tuple[PyTree, dict[str, jax.Array]], share: Sequence[Batch]) -> Any:
            for batch in share:
                held = self.accumulate(params, frozen, *held, put_rows(batch, self.mesh))
                if streams > 1:  # else the device's queue would put all streams in one line
                    jax.block_until_ready(held[1])
            return held

        held = map_in_threads(streams, add, [zeros() for _ in shares], shares)
        grads, sums = held[0]
        for part in held[1:]:
            grads, sums = self.join((grads, sums), part)
        params, opt_state, extra = self.apply(params, opt_state, grads, jnp.float32(total))
        found = {name: float(value) for name, value in jax.device_get({**sums, **extra}).items()}
        return params, opt_state, found | {"loss": found["loss"] / total}
