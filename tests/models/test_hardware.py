"""Mesh, dtype and kernel are checked with their fields' names, and a mesh may use a part of the devices."""

import logging
import types

import jax
import numpy as np
import pytest

from configs import r3rag_cold_start, r3rag_sft, rsearch_grpo
from rrl.errors import UserError
from rrl.models import hardware
from rrl.models.hardware import ComputeConfig, MeshConfig, has_native_bfloat16, peak_memory


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({}, (1, 1, 1)),
        ({"fsdp": 2, "tensor": 2}, (1, 2, 2)),
        ({"fsdp": -1}, (1, 8, 1)),
        ({"data": 2, "fsdp": -1, "tensor": 2}, (2, 2, 2)),
    ],
)
def test_a_mesh_uses_the_number_of_devices_in_its_config(fields, shape):
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
        ({"dtype": "int8"}, r"compute\.dtype='int8' is unknown; choose one of auto, float32, bfloat16"),
        ({"dtype": "float16"}, r"compute\.dtype='float16' is unknown; choose one of auto, float32, bfloat16"),
        ({"remat": "all"}, r"compute\.remat='all' is unknown; choose one of none, dots, full"),
        ({"attention": "flash"}, r"compute\.attention='flash' is unknown; choose one of auto, blocks, xla"),
    ],
)
def test_unknown_values_are_refused_by_field(fields, words):
    with pytest.raises(UserError, match=words):
        ComputeConfig(**fields)


def test_a_kernel_that_does_not_run_on_the_platform_is_refused_by_field():
    assert ComputeConfig().backend("cpu") == "blocks"
    with pytest.raises(UserError, match=r"compute\.attention=splash runs on TPUs only, but this is a cpu"):
        ComputeConfig(attention="splash").backend("cpu")


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_dtype_auto_is_float32_only_on_a_cpu(platform, caplog):
    assert ComputeConfig("auto").for_platform(platform).dtype == (
        "float32" if platform == "cpu" else "bfloat16"
    )
    assert ComputeConfig().for_platform(platform).dtype == "float32"
    assert not caplog.records


@pytest.mark.parametrize(
    ("native", "words"), [(False, "converts each weight to float32"), (True, "compiled CPU layers")]
)
def test_bfloat16_on_a_cpu_is_kept_with_a_warning(native, words, monkeypatch, caplog):
    monkeypatch.setattr(hardware, "has_native_bfloat16", lambda: native)
    with caplog.at_level(logging.WARNING):
        assert ComputeConfig("bfloat16").for_platform("gpu").dtype == "bfloat16" and not caplog.records
        assert ComputeConfig("bfloat16").for_platform("cpu").dtype == "bfloat16"
    assert words in caplog.text and ("converts" in caplog.text) == (not native)


@pytest.mark.parametrize(
    ("version", "processor", "native"),
    [
        ((0, 12, 0), "flags\t\t: fpu avx512f avx512_bf16 xsave\n", True),
        ((0, 12, 0), "flags\t\t: fpu amx_bf16\n", True),
        ((0, 12, 0), "Features\t: fp asimd bf16\n", True),
        ((0, 10, 2), "flags\t\t: fpu avx512f avx512_bf16 xsave\n", False),
        ((0, 12, 0), "flags\t\t: fpu avx512f avx2\n", False),
        ((0, 12, 0), "bugs\t\t: avx512_bf16\n", False),
        ((0, 12, 0), None, False),
    ],
)
def test_native_bfloat16_needs_the_jax_version_and_the_instructions(
    version, processor, native, monkeypatch, tmp_path
):
    if processor is not None:
        (tmp_path / "cpuinfo").write_text("processor\t: 0\n" + processor)
    monkeypatch.setattr(hardware, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(jax, "__version_info__", version)
    has_native_bfloat16.cache_clear()
    assert has_native_bfloat16() == native
    has_native_bfloat16.cache_clear()


def test_no_config_sets_bfloat16_explicitly():
    for made, arg in (
        (rsearch_grpo, "size=3b,data=.,policy=assets/miniwiki-policy"),
        (rsearch_grpo, "size=7b,data=.,policy=assets/miniwiki-policy"),
        (r3rag_sft, "size=7b"),
        (r3rag_cold_start, "data=FOLDER,model=FOLDER"),
    ):
        assert made.get_config(arg).compute.dtype == "auto", (made.__name__, arg)


def test_peak_memory_is_that_of_the_host_and_of_the_fullest_device(monkeypatch):
    held = np.ones(64 * 2**20 // 8)
    assert held.nbytes / 2**30 < peak_memory()["memory/host"] < 1000
    assert "memory/device" not in peak_memory()  # CPUs report no memory
    devices = [
        types.SimpleNamespace(memory_stats=lambda g=g: {"peak_bytes_in_use": g * 2**30}) for g in (3, 5)
    ]
    silent = types.SimpleNamespace(memory_stats=lambda: None)
    monkeypatch.setattr(jax, "local_devices", lambda: [*devices, silent])
    assert peak_memory()["memory/device"] == 5
