"""The host callback under load: no standstill in a thousand turns, on eight devices of one process and of two, and in two
loops of one device."""

import jax
import pytest

from rrl.parallel.mesh import make_mesh
from tests.rollout.soak import TURNS, soak
from tests.two_processes import ROOT, run_twice

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_eight_devices_do_not_stand_still(sizes):
    assert soak(make_mesh(**sizes)) >= TURNS


def test_two_loops_of_one_device_do_not_stand_still():
    assert soak(make_mesh(1, 1, 1, devices=jax.devices()[:1]), workers=2) >= TURNS


def test_two_processes_do_not_stand_still():
    jax.clear_caches()
    assert all(said["turns"] >= TURNS for said in run_twice(str(ROOT / "tests/rollout/soak.py"), timeout=900))
