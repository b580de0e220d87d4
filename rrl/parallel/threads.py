"""Threads that compute several microbatches at the same time on one CPU device. One microbatch does not keep two cores busy."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import jax
from jax.sharding import Mesh

from rrl.parallel.runtime import available_cores

T = TypeVar("T")


def parallel_microbatches_on(mesh: Mesh | None, requested: int) -> int:
    """`requested` (`ObjectiveConfig.parallel_microbatches`) on a single CPU device; 1 on all other devices and meshes."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return requested if (mesh is None or mesh.size == 1) and device.platform == "cpu" else 1


def map_in_threads(threads: int, function: Callable[..., T], *items: Iterable) -> list[T]:
    """`list(map(function, *items))` with `threads` threads; without threads if `threads` is 1 or there is one core."""
    if threads == 1 or available_cores() == 1:
        return list(map(function, *items))
    with ThreadPoolExecutor(threads, "rrl-microbatch") as pool:
        return list(pool.map(function, *items))
