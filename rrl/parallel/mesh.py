"""The device mesh: data (batch), fsdp (batch and parameters), tensor (inside a layer)."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from rrl.errors import UserError

AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")
"""The axes that rows of a batch are split over."""


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with axes data, fsdp and tensor, all Auto; one of the sizes may be -1: whatever is left.

    Raises:
        UserError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh(
        mesh_sizes(data, fsdp, tensor, len(devices)),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
        devices=list(devices),
    )


def mesh_sizes(data: int, fsdp: int, tensor: int, devices: int) -> tuple[int, int, int]:
    """The sizes of the three axes for a number of devices; raises as `make_mesh` does."""
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
    free = [name for name, size in sizes.items() if size == -1]
    if any(size == 0 or size < -1 for size in sizes.values()) or len(free) > 1:
        raise UserError(
            f"mesh {asked}: sizes must be at least 1, and at most one may be -1 (whatever is left)"
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and devices % fixed == 0:
        sizes[free[0]] = devices // fixed
    if math.prod(sizes.values()) != devices:
        raise UserError(f"mesh {asked} does not fit {devices} devices: the sizes must multiply to {devices}")
    return sizes["data"], sizes["fsdp"], sizes["tensor"]
