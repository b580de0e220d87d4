"""Several microbatches at once on one CPU, which one by itself leaves idle half of the time."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import jax
from jax.sharding import Mesh

from rrl.parallel.runtime import available_cores

T = TypeVar("T")


def parallel_microbatches_on(mesh: Mesh | None, streams: int) -> int:
    """How many there are, of the `streams` of an `ObjectiveConfig`: only one CPU has more than one."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return streams if (mesh is None or mesh.size == 1) and device.platform == "cpu" else 1


def map_in_threads(streams: int, function: Callable[..., T], *items: Iterable) -> list[T]:
    """`map` over so many threads; where there is one stream, or one core, here and one after another."""
    if streams == 1 or available_cores() == 1:
        return list(map(function, *items))
    with ThreadPoolExecutor(streams, "rrl-stream") as pool:
        return list(pool.map(function, *items))
