"""Workers on one CPU: how many episode loops share the rows, and how XLA compiles their programs."""

import functools

import jax
import jax.numpy as jnp

from rrl.errors import UserError
from rrl.models.config import DecoderConfig, matrix_parameters
from rrl.parallel.runtime import available_cores
from rrl.rollout.config import EngineConfig

MIN_ROWS_PER_WORKER = 8
"""Minimum rows per worker if the number of workers is chosen automatically."""

CPU_CACHE_BYTES = 32 * 2**20
"""Larger weights do not stay in a processor's caches from one decode step to the next."""

COMPILER_OPTIONS = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
"""XLA's compiler options for one CPU."""


def weight_bytes(config: DecoderConfig) -> int:
    """Return the bytes of weights that a decode step reads on a CPU, in float32: all layers and the output embedding."""
    return 4 * int(matrix_parameters(config) + config.hidden * config.vocab_size)


def weights_dominate(config: DecoderConfig) -> bool:
    """Return whether reading the weights from memory dominates the time of a decode step on a CPU.

    If so, a step of fewer rows takes about as long, so that `shape_probe` tries none; and one worker with all cores reads the
    weights once, while several workers would each read them. Smaller weights stay in the caches: then the time depends on the
    rows and on many small operations, which do not get faster with a second core.
    """
    return weight_bytes(config) > CPU_CACHE_BYTES


def worker_count(config: EngineConfig, decoder: DecoderConfig) -> int:
    """Return the number of workers of an engine on one CPU.

    `config.workers` if given. Otherwise one if the weights dominate, else one per core with at least MIN_ROWS_PER_WORKER rows
    each, or the next smaller number that divides the rows.

    Raises:
      UserError: `config.workers` does not divide the rows, or exceeds both 2 and the number of cores.
    """
    cores = available_cores()
    if config.workers:
        if config.rows % config.workers or config.workers > max(2, cores):
            raise UserError(
                f"rollout.workers={config.workers} must divide rollout.rows={config.rows}, and be at most {max(2, cores)} on "
                f"{cores} cores; 0 chooses a valid number"
            )
        return config.workers
    if weights_dominate(decoder):
        return 1
    max_workers = min(cores, max(1, config.rows // MIN_ROWS_PER_WORKER))
    return next(count for count in range(max_workers, 0, -1) if config.rows % count == 0)


@functools.cache
def compiler_options(workers: int) -> dict[str, bool]:
    """Return XLA's compiler options for one CPU.

    Operations run sequentially, because handing a small operation to another thread takes longer than the operation. Each of
    several workers uses one core; further cores stay idle, so that results do not depend on the number of cores. Options that
    this XLA does not know are omitted.
    """
    options = dict(COMPILER_OPTIONS)
    if workers > 1:
        options["xla_cpu_multi_thread_eigen"] = False
    known = {}
    for name, value in options.items():
        try:
            jax.jit(jnp.negative, compiler_options={name: value}).lower(0.0).compile()
        except jax.errors.JaxRuntimeError:
            continue
        known[name] = value
    return known
