"""How a run uses its devices: the mesh it is spread over, what its policy computes with, and the memory it takes."""

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
"""float16 would need its loss scaled."""

PROCESSOR = Path("/proc/cpuinfo")
"""Where Linux names what the processor can do."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices on each axis of the mesh; one of them may be -1: whatever is left. 1, 1, 1 is a single device."""

    data: int = 1
    """Rows of a batch are split, parameters are held whole by each."""
    fsdp: int = 1
    """Rows are split, and so are parameters and the optimiser's state."""
    tensor: int = 1
    """Heads and the width of each layer are split."""

    def make(self, devices: list[jax.Device] | None = None) -> Mesh:
        """The mesh; UserError where the sizes do not fit the devices."""
        devices = jax.devices() if devices is None else devices
        if -1 not in (sizes := (self.data, self.fsdp, self.tensor)):
            devices = devices[: max(1, self.data * self.fsdp * self.tensor)]
        try:
            return make_mesh(*sizes, devices)
        except UserError as error:
            raise UserError(f"{error}; set --config.mesh.data, .fsdp and .tensor") from error


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
    """What the policy computes with."""

    dtype: str = "float32"
    """Of the computation and of the key-value cache; norms, softmax, log-probabilities and losses are float32. auto: bfloat16
    on GPUs and TPUs, float32 on a CPU, whose compiled layers (`rrl.models.cpu.layers`) know no other."""
    param_dtype: str = "float32"
    """Of the parameters that the optimiser changes, the master weights, and of its state. In bfloat16 a step smaller than
    0.4 % of a weight is lost: for high learning rates only."""
    attention: str = "auto"
    """Kernel of packed batches: xla, cudnn (NVIDIA GPUs, 16 bit), splash (TPUs; no `objective.share_prefixes`), or auto: the
    fastest that runs there."""
    remat: Remat = "none"
    """What the backward pass recomputes: none, dots (all but matrix products), full (each layer from its input)."""

    def __post_init__(self) -> None:
        one_of(("auto", *DTYPES), self, "dtype", where="compute.")
        one_of(DTYPES, self, "param_dtype", where="compute.")
        one_of(get_args(Remat), self, "remat", where="compute.")
        one_of(("auto", *get_args(AttentionBackend)), self, "attention", where="compute.")

    def for_platform(self, platform: str) -> "ComputeConfig":
        """The same with the dtype that `auto` means on a platform ("cpu", "gpu" or "tpu").

        Logs a warning where bfloat16 was asked for and is slower than float32.
        """
        if self.dtype == "auto":
            return dataclasses.replace(self, dtype="float32" if platform == "cpu" else "bfloat16")
        if self.dtype == "bfloat16" and platform == "cpu":
            why = "rollouts do without the layers compiled for processors, which compute in float32"
            if not has_native_bfloat16():
                why = f"jax {jax.__version__} makes a float32 copy of each weight for each product, and {why}"
            logging.getLogger(__name__).warning(
                "compute.dtype=bfloat16 is slower than float32 on this CPU: %s. compute.dtype=auto is float32 here.",
                why,
            )
        return self

    def backend(self, platform: str, branches: bool = False) -> AttentionBackend:
        """The attention kernel on a platform, for rows with or without branches; UserError where it does not run there."""
        try:
            return choose_backend(self.attention, platform, jnp.dtype(self.dtype), branches)
        except UserError as error:
            raise UserError(f"compute.{error}") from error


@functools.cache
def has_native_bfloat16() -> bool:
    """Whether XLA multiplies bfloat16 on this machine's CPU as it is, without a float32 copy.

    That takes jax 0.12, and a processor with the instructions (avx512_bf16 or amx_bf16 of x86, bf16 of ARM).
    """
    if jax.__version_info__ < (0, 12):
        return False
    try:
        flags = re.findall(r"^(?:flags|Features)\s*:(.*)$", PROCESSOR.read_text(), re.MULTILINE)
    except OSError:
        return False
    return bool(flags) and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags[0].split())


def peak_memory() -> dict[str, float]:
    """GiB that this process, and the fullest of its devices, have held at most since the start.

    "memory/host" and "memory/device"; without the second where devices do not tell (a CPU's memory is the host's).
    """
    unit = 1 if sys.platform == "darwin" else 1024
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    told = [stats["peak_bytes_in_use"] for device in jax.local_devices() if (stats := device.memory_stats())]
    found = {"memory/host": host} | ({"memory/device": max(told)} if told else {})
    return {name: size / 2**30 for name, size in found.items()}
