"""Accelerators with their published numbers, and topologies to compile for without owning the devices."""

import contextlib
import dataclasses
import os
import re

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from rrl.errors import UserError
from rrl.parallel.memory import GIB, host_memory
from rrl.parallel.mesh import AXES, make_mesh, mesh_sizes


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published numbers of one chip; 0 if not published."""

    label: str
    platform: str
    """JAX's platform name: tpu, gpu or cpu."""
    flops: float
    """Dense bfloat16 floating-point operations per second."""
    bandwidth: float
    """Memory bandwidth, bytes per second."""
    memory: float
    """Bytes of memory that a program can use; for TPUs the compiler's limit, which differs slightly from the published size."""
    interconnect: float
    """Bytes per second out of the chip over all its links."""
    example: str
    """Name of a topology of these chips, for error messages."""


CHIPS = {
    "v5e": Chip("TPU v5e", "tpu", 197e12, 819e9, 15.75 * GIB, 200e9, "v5e:4x4"),
    "v5p": Chip("TPU v5p", "tpu", 459e12, 2765e9, 95.74 * GIB, 600e9, "v5p:4x4x4"),
    "v6e": Chip("TPU v6e", "tpu", 918e12, 1640e9, 31.25 * GIB, 448e9, "v6e:4x4"),
    "h100": Chip("H100 SXM", "gpu", 989e12, 3350e9, 80e9, 450e9, "h100:8"),
    "cpu": Chip("CPU", "cpu", 0, 0, 0, 0, "cpu:8"),
}
"""The chips by name. Their published memory: v5e 16 GB, v5p 95 GB, v6e 32 GB, H100 80 GB."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A number of equal chips."""

    name: str
    chip: Chip
    size: int
    """Number of chips."""
    devices: tuple[jax.Device, ...] | None
    """Describe the chips to the compiler; None if JAX cannot describe them."""

    def mesh(self, data: int, fsdp: int, tensor: int) -> Mesh | AbstractMesh:
        """A mesh of all chips; an abstract mesh if `devices` is None."""
        if self.devices is not None:
            return make_mesh(data, fsdp, tensor, devices=self.devices)
        sizes = mesh_sizes(data, fsdp, tensor, self.size)
        return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def open_topology(name: str) -> Topology:
    """Returns a topology by its name: a TPU slice ("v5e:4x4", "v5p:4x4x4") or a number of other chips ("h100:8", "cpu:8").

    Raises:
        UserError: the chip or shape is unknown, libtpu is missing, or the CPU backend already runs with fewer devices.
    """
    examples = ", ".join(chip.example for chip in CHIPS.values())
    kind, _, shape = name.partition(":")
    sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) else []
    if kind not in CHIPS or not sizes:
        raise UserError(
            f"topology={name!r} is unknown; write a chip and a number of chips, such as {examples}"
        )
    chip = CHIPS[kind]
    if chip.platform == "tpu":
        dimensions = chip.example.count("x") + 1
        if len(sizes) != dimensions:  # libtpu also accepts slices that do not exist
            raise UserError(
                f"topology={name!r}: a slice of {chip.label}s has {dimensions} dimensions; write one such as {chip.example}"
            )
        devices = _tpu_devices(name)
        return Topology(name, chip, len(devices), devices)
    if len(sizes) > 1:
        raise UserError(
            f"topology={name!r}: {chip.label}s have no grid; write the number of chips, as in {chip.example}"
        )
    if chip.platform == "gpu":
        return Topology(name, chip, sizes[0], None)
    chip = dataclasses.replace(chip, memory=host_memory() / sizes[0])
    return Topology(name, chip, sizes[0], _cpu_devices(name, sizes[0]))


def _tpu_devices(name: str) -> tuple[jax.Device, ...]:
    """The devices of a TPU slice, described by libtpu alone."""
    from jax.experimental import topologies

    # Without these variables libtpu queries the machine for its TPU and fails if there is none.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")  # required, but the topology's name decides
    # No chip is used, so two processes do not conflict.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except RuntimeError as error:
        if "not installed" in str(error) or "libtpu" in str(error):
            raise UserError(
                f"topology={name!r} needs libtpu, which compiles for TPUs on any Linux machine: pip install -e '.[tpu]'"
            ) from error
        raise UserError(
            f"topology={name!r} is not a TPU slice: {error}; write one such as v5e:4x4 or v5p:4x4x4"
        ) from error


def _cpu_devices(name: str, count: int) -> tuple[jax.Device, ...]:
    """Virtual CPU devices; their number can only be set before JAX starts."""
    with contextlib.suppress(RuntimeError):  # JAX has already started
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UserError(
            f"topology={name!r}: JAX already runs with {len(devices)} CPU devices; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before it starts"
        )
    return tuple(devices[:count])
