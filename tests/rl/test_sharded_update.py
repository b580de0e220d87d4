"""Any mesh gives the same loss, gradients and parameters as one device, also over two processes."""

import functools
import itertools

import jax
import numpy as np
import pytest

from rrl.parallel.mesh import make_mesh
from tests.rl.sharded_step import step
from tests.two_processes import ROOT, run_twice

MESHES = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(sizes) in (2, 4, 8)]


@functools.cache
def alone():
    return step(None)


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        for name, value in other.items():
            np.testing.assert_allclose(one[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def check(sizes):
    expected, metrics = alone()
    params, found = step(make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)]))
    same(found, metrics)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, expected)


@pytest.mark.slow
def test_a_mesh_with_three_axes_gives_the_update_of_one_device():
    check((2, 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_mesh_of_2_4_and_8_devices_gives_the_update_of_one_device(sizes):
    check(sizes)


@pytest.mark.slow
def test_two_processes_give_the_update_of_one_device():
    program = str(ROOT / "tests/rl/sharded_step.py")
    for found in run_twice(program, "2", "2", "2"):
        same(found, alone()[1])
