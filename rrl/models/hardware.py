"""A run's use of its devices: mesh, dtypes, attention kernel, rematerialisation, and peak memory."""

import dataclasses
import functools
import logging
import re
import resource
import sys
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rrl.errors import UserError, one_of
from rrl.models.attention_backends import AttentionBackend, choose_backend
from rrl.models.decoder import Remat
from rrl.parallel.mesh import make_mesh

DTYPES = ("float32", "bfloat16")
"""float16 is missing because it would need loss scaling."""

CPU_INFO = Path("/proc/cpuinfo")
"""File in which Linux lists the CPU's instruction sets."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Number of devices on each axis of the mesh. One may be -1: all remaining devices. 1, 1, 1 is a single device."""

    data: int = 1
    """Data parallelism: splits the rows of a batch and replicates the parameters."""
    fsdp: int = 1
    """Fully sharded data parallelism: splits rows, parameters and optimiser state."""
    tensor: int = 1
    """Tensor parallelism: splits the heads and the width of each layer."""

    def make(self, devices: list[jax.Device] | None = None) -> Mesh:
        """Makes the mesh. Raises UserError if the sizes do not fit the number of devices."""
        devices = jax.devices() if devices is None else devices
        if -1 not in (sizes := (self.data, self.fsdp, self.tensor)):
            devices = devices[: max(1, self.data * self.fsdp * self.tensor)]
        try:
            return make_mesh(*sizes, devices)
        except UserError as error:
            raise UserError(f"{error}; set --config.mesh.data, .fsdp and .tensor") from error


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
    """Dtypes, attention kernel and rematerialisation of a run's models."""

    dtype: str = "float32"
    """Dtype of the computation, of the key-value cache, and of the parameters of models that are not trained (reader, judge):
    float32, bfloat16 or auto. Norms, softmax, log-probabilities and losses are always float32. auto: bfloat16 on GPUs and TPUs;
    float32 on a CPU, whose compiled layers (`rrl.models.cpu.layers`) support only float32."""
    param_dtype: str = "float32"
    """Dtype of the master weights of trained models and of the optimiser's state. In bfloat16 an update smaller than 0.2 to
    0.4 % of a weight is lost, so use it only with high learning rates."""
    attention: str = "auto"
    """Attention kernel for packed batches: blocks (CPUs), xla, cudnn (NVIDIA GPUs, 16 bit), splash (TPUs, without
    `objective.share_prefixes`), or auto, the fastest one that runs on the platform."""
    remat: Remat = "none"
    """What the backward pass recomputes: none, dots (everything except products with weight matrices) or full (each layer from
    its input). Attention weights are recomputed with every setting."""

    def __post_init__(self) -> None:
        one_of(("auto", *DTYPES), self, "dtype", where="compute.")
        one_of(DTYPES, self, "param_dtype", where="compute.")
        one_of(get_args(Remat), self, "remat", where="compute.")
        one_of(("auto", *get_args(AttentionBackend)), self, "attention", where="compute.")

    def for_platform(self, platform: str) -> "ComputeConfig":
        """Replaces dtype=auto by the dtype for a platform ("cpu", "gpu" or "tpu").

        Logs a warning if bfloat16 is set on a CPU, where it is slower than float32.
        """
        if self.dtype == "auto":
            return dataclasses.replace(self, dtype="float32" if platform == "cpu" else "bfloat16")
        if self.dtype == "bfloat16" and platform == "cpu":
            why = "rollouts cannot use the compiled CPU layers, which compute in float32"
            if not has_native_bfloat16():
                why = f"jax {jax.__version__} converts each weight to float32 for each product, and {why}"
            logging.getLogger(__name__).warning(
                "compute.dtype=bfloat16 is slower than float32 on this CPU: %s. compute.dtype=auto is float32 here.",
                why,
            )
        return self

    def backend(self, platform: str, branches: bool = False) -> AttentionBackend:
        """The attention kernel for a platform, for rows with or without branches. Raises UserError if it cannot run there."""
        try:
            return choose_backend(self.attention, platform, jnp.dtype(self.dtype), branches)
        except UserError as error:
            raise UserError(f"compute.{error}") from error


@functools.cache
def has_native_bfloat16() -> bool:
    """Whether XLA multiplies bfloat16 on this machine's CPU without converting it to float32.

    This needs jax 0.12 and a CPU with bfloat16 instructions (avx512_bf16 or amx_bf16 on x86, bf16 on ARM).
    """
    if jax.__version_info__ < (0, 12):
        return False
    try:
        flags = re.findall(r"^(?:flags|Features)\s*:(.*)$", CPU_INFO.read_text(), re.MULTILINE)
    except OSError:
        return False
    return bool(flags) and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags[0].split())


def peak_memory() -> dict[str, float]:
    """Peak memory since the start, in GiB.

    Returns:
        "memory/host": of this process. "memory/device": of the local device with the highest peak; missing on CPUs, whose
        memory is the host's.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    devices = [
        stats["peak_bytes_in_use"] for device in jax.local_devices() if (stats := device.memory_stats())
    ]
    peaks = {"memory/host": host} | ({"memory/device": max(devices)} if devices else {})
    return {name: size / 2**30 for name, size in peaks.items()}
