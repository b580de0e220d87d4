"""Accelerators by name, with their published numbers, and the devices of a slice that nobody here owns."""

import contextlib
import dataclasses
import os
import re

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from rrl.errors import UserError
from rrl.parallel.mesh import AXES, make_mesh, mesh_sizes


@dataclasses.dataclass(frozen=True)
class Chip:
    """What its maker says of one chip; 0: not published."""

    label: str
    platform: str
    """As JAX calls it: tpu, gpu or cpu."""
    flops: float
    """Dense bfloat16 operations a second."""
    bandwidth: float
    """Bytes a second between the chip and its memory."""
    memory: float
    """Bytes a program can have: for TPUs what the compiler grants, a little less than what is published."""
    interconnect: float
    """Bytes a second out of the chip over all its links."""
    shape: str
    """How a topology of it is written."""


GIB = 2.0**30
CHIPS = {
    "v5e": Chip("TPU v5e", "tpu", 197e12, 819e9, 15.75 * GIB, 200e9, "v5e:4x4"),
    "v5p": Chip("TPU v5p", "tpu", 459e12, 2765e9, 95.74 * GIB, 600e9, "v5p:4x4x4"),
    "v6e": Chip("TPU v6e", "tpu", 918e12, 1640e9, 31.25 * GIB, 448e9, "v6e:4x4"),
    "h100": Chip("H100 SXM", "gpu", 989e12, 3350e9, 80e9, 450e9, "h100:8"),
    "cpu": Chip("CPU", "cpu", 0, 0, 0, 0, "cpu:8"),
}
"""Published: v5e 16 GB, v5p 95 GB, v6e 32 GB, H100 80 GB."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A number of equal chips; `devices` are what a compiler needs, None where none can be described."""

    name: str
    chip: Chip
    size: int
    devices: tuple[jax.Device, ...] | None

    def mesh(self, data: int, fsdp: int, tensor: int) -> Mesh | AbstractMesh:
        """A mesh of all chips; an abstract one where there are no devices."""
        if self.devices is not None:
            return make_mesh(data, fsdp, tensor, devices=self.devices)
        sizes = mesh_sizes(data, fsdp, tensor, self.size)
        return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def open_topology(name: str) -> Topology:
    """The topology of a name: a TPU slice ("v5e:4x4", "v5p:4x4x4"), or a number of others ("h100:8", "cpu:8").

    Raises:
        UserError: no such chip or shape, libtpu is missing, or the CPU backend runs already with fewer devices.
    """
    examples = ", ".join(chip.shape for chip in CHIPS.values())
    kind, _, shape = name.partition(":")
    sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) else []
    if kind not in CHIPS or not sizes:
        raise UserError(f"topology={name!r} is unknown; write a chip and its number, such as {examples}")
    chip = CHIPS[kind]
    if chip.platform == "tpu":
        if len(sizes) != (grid := chip.shape.count("x") + 1):  # libtpu takes slices that nobody offers
            raise UserError(
                f"topology={name!r}: a slice of {chip.label}s has {grid} dimensions; write one such as {chip.shape}"
            )
        devices = _tpu(name)
        return Topology(name, chip, len(devices), devices)
    if len(sizes) > 1:
        raise UserError(
            f"topology={name!r}: {chip.label}s have no grid; write their number, as in {chip.shape}"
        )
    if chip.platform == "gpu":
        return Topology(name, chip, sizes[0], None)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / sizes[0]
    return Topology(name, dataclasses.replace(chip, memory=memory), sizes[0], _cpu(name, sizes[0]))


def _tpu(name: str) -> tuple[jax.Device, ...]:
    """The devices of a TPU slice, described by libtpu alone."""
    from jax.experimental import topologies

    # Without these libtpu asks the machine which TPU it is, and complains that it is none.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")  # of a machine; the topology's name decides
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is used, so two plans do not collide
    try:
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except RuntimeError as error:
        if "not installed" in str(error) or "libtpu" in str(error):
            raise UserError(
                f"topology={name!r} needs libtpu, which compiles for TPUs on any Linux machine: pip install -e '.[tpu]'"
            ) from error
        raise UserError(
            f"topology={name!r} is no TPU slice: {error}; write one such as v5e:4x4 or v5p:4x4x4"
        ) from error


def _cpu(name: str, count: int) -> tuple[jax.Device, ...]:
    """Virtual CPU devices; as many as are asked for where JAX has not started yet."""
    with contextlib.suppress(RuntimeError):  # it has
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UserError(
            f"topology={name!r}: JAX runs with {len(devices)} CPU devices already; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before it starts"
        )
    return tuple(devices[:count])
