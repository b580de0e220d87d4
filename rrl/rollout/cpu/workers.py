"""How many workers (loops) share the rows on one CPU, and how XLA compiles their programs."""

import functools

import jax
import jax.numpy as jnp

from rrl.errors import UserError
from rrl.models.config import DecoderConfig, matrix_parameters
from rrl.parallel.runtime import available_cores
from rrl.rollout.config import EngineConfig

MIN_ROWS_PER_WORKER = 8
"""A worker of fewer rows is not worth its core."""

CPU_CACHE_BYTES = 32 * 2**20
"""Weights of more bytes than this do not stay in a processor's caches from one decode step to the next."""

COMPILER_OPTIONS = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
"""Of XLA, for one CPU."""


def weight_bytes(config: DecoderConfig) -> int:
    """Bytes of weights that a decode step reads on a CPU, in float32: all layers and the table of logits."""
    return 4 * int(matrix_parameters(config) + config.hidden * config.vocab_size)


def weights_dominate(config: DecoderConfig) -> bool:
    """Whether reading the weights from memory is what a decode step costs on a CPU.

    Then a step of fewer rows takes about as long, so that none is tried (`shape_probe`), and one worker that uses all
    cores reads the weights once where several would each read them. Smaller weights stay in the caches: there a step costs what
    its rows cost, and many small operations, which gain nothing from a second core.
    """
    return weight_bytes(config) > CPU_CACHE_BYTES


def worker_count(config: EngineConfig, decoder: DecoderConfig) -> int:
    """How many workers share the rows of an engine on one CPU: `config.workers`, where it is given. Otherwise one if the weights
    dominate, else one a core, of MIN_ROWS_PER_WORKER rows at least.

    Raises:
        UserError: `config.workers` does not divide the rows, or is more than the cores.
    """
    cores = available_cores()
    if config.workers:
        if config.rows % config.workers or config.workers > max(2, cores):
            raise UserError(
                f"rollout.workers={config.workers} must divide rollout.rows={config.rows}, and be at most {max(2, cores)} on "
                f"{cores} cores; 0 finds a number that does"
            )
        return config.workers
    if weights_dominate(decoder):
        return 1
    most = min(cores, max(1, config.rows // MIN_ROWS_PER_WORKER))
    return next(count for count in range(most, 0, -1) if config.rows % count == 0)


@functools.cache
def compiler_options(workers: int) -> dict[str, bool]:
    """How XLA compiles for one CPU: operations come one after another, and where there are several workers, each keeps to its
    core. To hand small operations to other threads takes longer than they do. Cores beyond the workers stay idle: bits are to be
    the same however many there are. An option that this XLA does not know is left out."""
    wanted = dict(COMPILER_OPTIONS)
    if workers > 1:
        wanted["xla_cpu_multi_thread_eigen"] = False
    known = {}
    for name, value in wanted.items():
        try:
            jax.jit(jnp.negative, compiler_options={name: value}).lower(0.0).compile()
        except jax.errors.JaxRuntimeError:
            continue
        known[name] = value
    return known
