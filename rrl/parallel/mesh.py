"""The device mesh: data (batch), fsdp (batch and parameters), tensor (inside a layer)."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

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


def data_shards(mesh: Mesh | AbstractMesh | None) -> int:
    """Over how many devices the rows of a batch are split."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in ROW_AXES)


def use_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Within the block, programs are spread over a mesh of several devices; nothing for one device or none."""
    return contextlib.nullcontext() if mesh is None or mesh.size == 1 else jax.set_mesh(mesh)


def put_rows(batch: Any, mesh: Mesh | None) -> Any:
    """A pytree of NumPy arrays with a leading axis of rows on the devices, split where there are several.

    Raises:
        UserError: the rows do not divide among the devices.
    """
    if mesh is None or mesh.size == 1:
        return jax.tree.map(jnp.asarray, batch)
    rows, shards = len(jax.tree.leaves(batch)[0]), data_shards(mesh)
    if rows % shards:
        raise UserError(
            f"a batch of {rows} rows does not divide among data x fsdp = {shards} shards of the mesh"
        )
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(ROW_AXES)))


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
