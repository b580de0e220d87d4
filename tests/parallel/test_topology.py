"""Topologies are described without their chips, or refused with an error that says how to fix it."""

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh

from rrl.errors import UserError
from rrl.parallel.topology import open_topology


def test_cpus_are_virtual_devices_that_share_the_machines_memory():
    topology = open_topology("cpu:8")
    assert topology.size == len(topology.devices) == 8
    assert isinstance(topology.mesh(1, 4, 2), Mesh)
    assert 0 < topology.chip.memory * 8 < 2**50


def test_gpus_have_published_numbers_but_no_devices_to_compile_for():
    topology = open_topology("h100:16")
    assert topology.devices is None
    mesh = topology.mesh(1, -1, 4)
    assert isinstance(mesh, AbstractMesh)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "tensor": 4}


@pytest.mark.parametrize("name", ["v9:4x4", "v5e", "h100:0", "cpu:", "tpu:8", "v5e:4x"])
def test_unknown_topologies_are_refused_with_examples(name):
    with pytest.raises(UserError, match=rf"topology='{name}' is unknown; .*v5e:4x4.*h100:8"):
        open_topology(name)


def test_only_tpus_have_a_grid():
    with pytest.raises(UserError, match="h100:8"):
        open_topology("h100:2x4")


@pytest.mark.parametrize(
    ("name", "words"),
    [("v6e:4x4x4", "v6es has 2 .*v6e:4x4"), ("v5e:16", "v5es has 2"), ("v5p:4x4", "v5ps has 3")],
)
def test_a_slice_must_have_its_chips_number_of_dimensions(name, words):
    with pytest.raises(UserError, match=f"topology='{name}': a slice of TPU {words}"):
        open_topology(name)


def test_more_cpus_than_jax_has_are_refused():
    count = len(jax.devices("cpu")) + 1
    with pytest.raises(UserError, match=f"xla_force_host_platform_device_count={count}"):
        open_topology(f"cpu:{count}")


def _raise(text):
    def get(platform, topology_name):
        raise RuntimeError(text)

    return get


def test_without_libtpu_the_extra_to_install_is_named(monkeypatch):
    monkeypatch.setattr(
        topologies, "get_topology_desc", _raise("JAX TPU support not installed; cannot generate")
    )
    with pytest.raises(UserError, match=r"pip install -e '\.\[tpu\]'"):
        open_topology("v5e:4x4")


def test_an_impossible_slice_is_refused_with_libtpus_message(monkeypatch):
    monkeypatch.setattr(topologies, "get_topology_desc", _raise('layout "v5e:9x9" is not divisible'))
    with pytest.raises(UserError, match=r"is not a TPU slice.*not divisible"):
        open_topology("v5e:9x9")
