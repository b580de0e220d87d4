"""Meshes fit the devices, or an error gives the reason."""

import jax
import pytest
from jax.sharding import AxisType

from rrl.errors import UserError
from rrl.parallel.mesh import make_mesh


@pytest.mark.parametrize("sizes", [(-1, 1, 1), (2, 2, 2), (1, 8, 1), (1, -1, 4), (4, 1, -1)])
def test_every_factorisation_makes_a_mesh_with_auto_axes(sizes):
    mesh = make_mesh(*sizes)
    assert mesh.size == 8
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert mesh.axis_types == (AxisType.Auto,) * 3


def test_a_mesh_may_use_a_part_of_the_devices():
    assert make_mesh(data=1, devices=jax.devices()[:1]).size == 1


@pytest.mark.parametrize("sizes", [(3, 1, 1), (-1, 3, 1), (-1, -1, 1), (0, 1, 1), (2, 2, 1)])
def test_sizes_that_do_not_fit_the_devices_are_refused(sizes):
    with pytest.raises(UserError, match="mesh data="):
        make_mesh(*sizes)
