"""`CpuKernels`: the CPU kernels of `rrl.models.cpu.layers` behind the interface `rrl.models.kernels.GenerationKernels`."""

import dataclasses
from collections.abc import Mapping

from jax.typing import DTypeLike
from jaxtyping import Array

from rrl.models.config import DecoderConfig
from rrl.models.cpu.layers import (
    LANES,
    can_attend,
    can_compute,
    cpu_attention,
    cpu_copy,
    cpu_draw,
    cpu_layers,
    supports,
)
from rrl.models.cpu.packed import PackedMatrix


def cpu_kernels(config: DecoderConfig, dtype: DTypeLike, threads: int = 1) -> "CpuKernels | None":
    """Return the kernels for caches of a model; None if they do not support it or cannot be compiled on this machine.

    Args:
        config: the model.
        dtype: of the computation and of the cache.
        threads: maximum number of threads of a call.
    """
    return CpuKernels(threads) if supports(config) and can_attend(dtype, config.head_dim) else None


@dataclasses.dataclass(frozen=True)
class CpuKernels:
    """The kernels, with their number of threads. `cpu_kernels` checks that they support a model, and compiles them."""

    threads: int = 1
    """Maximum number of threads of a call; the result is bitwise independent of it."""

    def attend(
        self, q: Array, k: Array, v: Array, layer: Array, positions: Array, rows: Array | None, slots: int
    ) -> Array:
        return cpu_attention(q, k, v, layer, positions, rows, slots)

    def copy_rows(
        self, k: Array, v: Array, source: Array, target: Array, begin: Array, end: Array
    ) -> tuple[Array, Array]:
        return cpu_copy(k, v, source, target, begin, end, threads=self.threads)

    def computes_layers(self, config: DecoderConfig, dtype: DTypeLike) -> bool:
        return can_compute(config, dtype)

    def run_layers(
        self,
        x: Array,
        rotary: tuple[Array, Array],
        weights: Mapping[str, Array | PackedMatrix],
        k: Array,
        v: Array,
        positions: Array,
        rows: Array | None,
        *,
        config: DecoderConfig,
        slots: int,
        last_layer_attends: bool,
    ) -> tuple[Array, tuple[Array, Array]]:
        return cpu_layers(
            x,
            rotary,
            weights,
            k,
            v,
            positions,
            rows,
            config=config,
            slots=slots,
            last_layer_attends=last_layer_attends,
            threads=self.threads,
        )

    def samples(self, vocab_size: int) -> bool:
        return vocab_size % LANES == 0

    def sample(
        self,
        hidden: Array,
        table: Array | PackedMatrix,
        uniform: Array,
        temperature: Array,
        *,
        top_p: float,
        top_k: int,
    ) -> tuple[Array, Array, Array]:
        return cpu_draw(hidden, table, uniform, temperature, top_p=top_p, top_k=top_k, threads=self.threads)
