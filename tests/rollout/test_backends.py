"""The backend of a mesh: one CPU, several CPU devices, accelerators."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.models.cpu.layers import can_attend
from rrl.models.decoder import Decoder
from rrl.models.lora import LoraConfig, add_lora
from rrl.parallel.mesh import make_mesh
from rrl.rollout.backend import Backend
from rrl.rollout.backends import select_backend
from rrl.rollout.config import EngineConfig
from rrl.rollout.cpu.backend import CpuBackend, SingleCpuBackend
from tests.tiny import tiny_shape

CONFIG = EngineConfig(rows=32, workers=2)
SHAPE = tiny_shape(304, 64, hidden_size=32)
SLIDING = tiny_shape(304, 64, hidden_size=32, use_sliding_window=True, sliding_window=8, max_window_layers=0)


def on_cpus(count, shape=SHAPE):
    return select_backend(CONFIG, shape, make_mesh(count, devices=jax.devices()[:count]))


def test_accelerators_use_xla_with_one_worker_and_the_largest_shapes():
    mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform="tpu")]), size=1)
    backend, decoder = select_backend(CONFIG, SHAPE, mesh), Decoder(SHAPE, rngs=nnx.Rngs(0))
    assert backend == Backend() and backend.workers == 1 and not backend.probes_shapes
    assert backend.kernels(jnp.float32) is None and backend.prepare(decoder) is decoder


def test_only_one_cpu_has_workers_and_a_probe_and_both_have_kernels():
    one, several = on_cpus(1), on_cpus(2)
    assert type(one) is SingleCpuBackend and type(several) is CpuBackend
    assert (one.workers, several.workers) == (2, 1) and one.probes_shapes and not several.probes_shapes
    assert one.computes_on_host and several.computes_on_host and one.slots_last and several.slots_last
    available = can_attend(jnp.float32, SHAPE.head_dim)
    for backend in (one, several):
        assert (backend.kernels(jnp.float32) is not None) == available
        assert backend.kernels(jnp.float16) is None
    assert one.computes_layers(jnp.float32) == available and not several.computes_layers(jnp.float32)


def test_a_model_with_sliding_windows_has_no_cpu_kernels():
    assert SLIDING.windows and on_cpus(1, SLIDING).kernels(jnp.float32) is None
    assert not on_cpus(1, SLIDING).computes_layers(jnp.float32)


def test_a_single_cpu_prepares_a_decoder_once_before_its_loop():
    if not can_attend(jnp.float32, SHAPE.head_dim):
        pytest.skip("this machine has no C++ compiler")
    decoder = Decoder(SHAPE, rngs=nnx.Rngs(0))
    add_lora(decoder, LoraConfig(rank=2), rngs=nnx.Rngs(0))
    prepared = on_cpus(1).prepare(decoder)
    assert not any("lora" in str(path[-1]) for path, _ in nnx.to_flat_state(nnx.state(prepared)))
    np.testing.assert_array_equal(prepared.transposed_embedding, decoder.embedding[...].T)
