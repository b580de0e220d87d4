"""What a run asks of its devices is checked by name, and a mesh may be smaller than the machine."""

import types

import jax
import numpy as np
import pytest

from rrl.errors import UserError
from rrl.train.hardware import ComputeConfig, MeshConfig, memory_used


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({}, (1, 1, 1)),
        ({"fsdp": 2, "tensor": 2}, (1, 2, 2)),
        ({"fsdp": -1}, (1, 8, 1)),
        ({"data": 2, "fsdp": -1, "tensor": 2}, (2, 2, 2)),
    ],
)
def test_a_mesh_takes_as_many_devices_as_it_says(fields, shape):
    assert MeshConfig(**fields).make(jax.devices()[:8]).devices.shape == shape


@pytest.mark.parametrize(
    "fields", [{"data": 3, "fsdp": -1}, {"data": 16}, {"data": 0}, {"data": -1, "fsdp": -1}]
)
def test_sizes_that_do_not_fit_the_devices_are_refused(fields):
    with pytest.raises(UserError, match=r"^mesh data=.*set --config\.mesh\.data, \.fsdp and \.tensor"):
        MeshConfig(**fields).make(jax.devices()[:8])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": "int8"}, r"compute\.dtype='int8' is unknown; choose one of float32, bfloat16"),
        ({"dtype": "float16"}, r"compute\.dtype='float16' is unknown; choose one of float32, bfloat16"),
        ({"remat": "all"}, r"compute\.remat='all' is unknown; choose one of none, dots, full"),
        ({"attention": "flash"}, r"compute\.attention='flash' is unknown; choose one of auto, blocks, xla"),
    ],
)
def test_unknown_choices_are_refused_by_name(fields, words):
    with pytest.raises(UserError, match=words):
        ComputeConfig(**fields)


def test_a_kernel_that_this_platform_lacks_is_refused_with_its_field():
    assert ComputeConfig().backend("cpu") == "blocks"
    with pytest.raises(UserError, match=r"compute\.attention=splash runs on TPUs only, this is a cpu"):
        ComputeConfig(attention="splash").backend("cpu")


def test_memory_is_the_hosts_and_that_of_the_fullest_device_that_tells(monkeypatch):
    held = np.ones(64 * 2**20 // 8)
    assert held.nbytes / 2**30 < memory_used()["memory/host"] < 1000
    assert "memory/device" not in memory_used()  # a CPU does not tell
    devices = [
        types.SimpleNamespace(memory_stats=lambda g=g: {"peak_bytes_in_use": g * 2**30}) for g in (3, 5)
    ]
    silent = types.SimpleNamespace(memory_stats=lambda: None)
    monkeypatch.setattr(jax, "local_devices", lambda: [*devices, silent])
    assert memory_used()["memory/device"] == 5
