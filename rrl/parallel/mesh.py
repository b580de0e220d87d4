"""The device mesh, with axes data (splits the batch), fsdp (batch and parameters) and tensor (heads and layer widths)."""

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
"""The axes over which the rows of a batch are split."""


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with axes data, fsdp and tensor, all of type Auto. One size may be -1: all remaining devices.

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
    """Number of shards into which the rows of a batch are split: the product of the sizes of axes data and fsdp."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in ROW_AXES)


def use_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Context manager that sets a mesh of several devices; it does nothing for one device or None."""
    return contextlib.nullcontext() if mesh is None or mesh.size == 1 else jax.set_mesh(mesh)


def put_rows(batch: Any, mesh: Mesh | None) -> Any:
    """Transfers a pytree of NumPy arrays to the devices. On a mesh of several devices, the leading axis (rows) is split.

    Raises:
        UserError: the number of rows is not a multiple of the number of data shards.
    """
    if mesh is None or mesh.size == 1:
        return jax.tree.map(jnp.asarray, batch)
    rows, shards = len(jax.tree.leaves(batch)[0]), data_shards(mesh)
    if rows % shards:
        raise UserError(
            f"a batch of {rows} rows cannot be split over data x fsdp = {shards} shards of the mesh; use a multiple of {shards}"
        )
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(ROW_AXES)))


def mesh_sizes(data: int, fsdp: int, tensor: int, devices: int) -> tuple[int, int, int]:
    """The sizes of the three axes on a mesh of `devices` devices; -1 is replaced.

    Raises:
        UserError: the sizes do not multiply to the number of devices.
    """
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    requested = ", ".join(f"{name}={size}" for name, size in sizes.items())
    remaining = [name for name, size in sizes.items() if size == -1]
    if any(size == 0 or size < -1 for size in sizes.values()) or len(remaining) > 1:
        raise UserError(
            f"mesh {requested}: sizes must be at least 1, and at most one may be -1 (all remaining devices)"
        )
    product = math.prod(size for size in sizes.values() if size != -1)
    if remaining and devices % product == 0:
        sizes[remaining[0]] = devices // product
    if math.prod(sizes.values()) != devices:
        raise UserError(
            f"mesh {requested} does not fit {devices} devices: the sizes must multiply to {devices}"
        )
    return sizes["data"], sizes["fsdp"], sizes["tensor"]
