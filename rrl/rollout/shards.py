"""Distribution over data shards, devices and processes: requests to shards, arrays to devices, results to processes."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree

from rrl.errors import describe_error
from rrl.parallel.gather import gather_objects
from rrl.rollout.scheduler import Scheduler

T = TypeVar("T")


def assign_to_shards(
    prompts: Sequence[Int[np.ndarray, "T"]], shards: int, workers: int = 1
) -> list[list[list[int]]]:
    """Assign requests to data shards, in groups. One worker takes a whole group.

    Requests with the same prompt form a group. If the number of groups is not a multiple of the number of all workers, the
    remaining groups, those with the shortest prompts, are split into single requests. So the workers can share the work
    evenly. Long prompts come first, since long questions tend to take more turns: short episodes then fill the slots at the
    end (longest processing time first, Graham 1969).

    Args:
      prompts: prompt of each request.
      shards: number of data shards.
      workers: number of workers of each shard.

    Returns:
      for each shard, groups of indices into `prompts`.
    """
    groups: dict[bytes, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(np.asarray(prompt, np.int32).tobytes(), []).append(index)
    ordered = sorted(groups.values(), key=lambda group: -len(prompts[group[0]]))
    whole_groups = len(ordered) - len(ordered) % (shards * workers)
    ordered[whole_groups:] = [[index] for group in ordered[whole_groups:] for index in group]
    return [ordered[shard::shards] for shard in range(shards)]


def gather_results(schedulers: Sequence[Scheduler], value: T) -> list[T]:
    """Return `value` of each process. Raises the error of a scheduler, or a RuntimeError if another process has one."""
    errors = [scheduler.error for scheduler in schedulers if scheduler.error is not None]
    parts = gather_objects((value, [describe_error(error) for error in errors]))
    if errors:
        raise errors[0]
    for process, (_, messages) in enumerate(parts):
        if messages:
            raise RuntimeError(f"the rollout failed in process {process}: {messages[0]}")
    return [value for value, _ in parts]


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    """Return the arrays on all devices of the mesh, including those of other processes."""
    sharding = NamedSharding(mesh, PartitionSpec())

    def put(leaf: Any) -> jax.Array:
        if jax.process_count() == 1:
            return jax.device_put(leaf, sharding)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(leaf)))
        return jax.device_put(np.asarray(leaf), sharding)

    return jax.tree.map(put, tree)
