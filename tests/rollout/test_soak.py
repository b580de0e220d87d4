"""The host callback under load: a thousand exchanges without a hang, on eight devices of one process and of two, and with two
workers on one device."""

import jax
import pytest

from rrl.parallel.mesh import make_mesh
from tests.rollout.soak import EXCHANGES, soak
from tests.two_processes import ROOT, run_twice

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_eight_devices_do_not_hang(sizes):
    assert soak(make_mesh(**sizes)) >= EXCHANGES


def test_two_workers_of_one_device_do_not_hang():
    assert soak(make_mesh(1, 1, 1, devices=jax.devices()[:1]), workers=2) >= EXCHANGES


def test_two_processes_do_not_hang():
    jax.clear_caches()
    outputs = run_twice(str(ROOT / "tests/rollout/soak.py"), timeout=900)
    assert all(output["exchanges"] >= EXCHANGES for output in outputs)
