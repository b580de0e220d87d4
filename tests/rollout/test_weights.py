"""`EngineConfig.weights`: the number format of the matrix products of rollouts on one CPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrl.data.trajectory import POLICY
from rrl.errors import UserError
from rrl.models.cpu.layers import can_attend
from rrl.models.cpu.packed import supports_format
from rrl.models.lora import LoraConfig, add_lora
from rrl.rl.logprobs import token_logprobs
from rrl.rl.packing import pack
from rrl.rollout.backend import Backend
from rrl.rollout.config import EngineConfig
from rrl.rollout.cpu import backend as cpu_backend
from rrl.rollout.engine import Engine
from rrl.rollout.protocol import SingleTurn
from tests.rollout.world import make_world

KEY = jax.random.key(3)
CONFIG = EngineConfig(rows=4, context=96, wake_threshold=4, prefill_tokens=64)
DIFFERENCE = {"float32": (0.0, 1e-6), "bfloat16": (1e-5, 1e-2), "int8": (1e-4, 5e-2)}
"""Bounds of the mean difference between the log-probabilities of sampler and trainer."""


@pytest.fixture(scope="module")
def world():
    return make_world()


@pytest.fixture
def large(monkeypatch):
    """Treats the small model like one whose weights are packed."""
    if not can_attend(jnp.float32, 16):
        pytest.skip("this machine has no C++ compiler")
    monkeypatch.setattr(cpu_backend, "weights_dominate", lambda config: True)


@pytest.fixture(params=DIFFERENCE)
def weights(request, large):
    """Each format that this processor supports."""
    if not supports_format(request.param):
        pytest.skip(f"this processor does not multiply {request.param}")
    return request.param


def sample(world, weights, decoder=None):
    decoder, (_, tokenizer, _, requests) = decoder or world[0], world
    with Engine(decoder, tokenizer, dataclasses.replace(CONFIG, weights=weights)) as engine:
        return engine.run(nnx.state(decoder), requests[:4], SingleTurn(turn_tokens=12), KEY)


def formats(world, weights):
    """The format in which an engine packs matrices, and that of its products."""
    decoder, tokenizer, _, _ = world
    with Engine(decoder, tokenizer, dataclasses.replace(CONFIG, weights=weights)) as engine:
        return engine.programs.backend.packed_format(jnp.float32), engine.product_format


@pytest.mark.parametrize("adapters", [False, True])
def test_log_probabilities_are_those_of_the_trainer_to_the_rounding_of_the_format(world, weights, adapters):
    decoder = nnx.clone(world[0])
    if adapters:
        add_lora(decoder, LoraConfig(rank=2), rngs=nnx.Rngs(0))
        for name in ("q_lora_b", "down_lora_b"):
            value = getattr(decoder.layers, name)
            value[...] = jax.random.normal(jax.random.key(1), value.shape) * 0.1
    trajectories = sample(world, weights, decoder)
    packed = pack([t.tokens for t in trajectories], [t.roles == POLICY for t in trajectories], CONFIG.context)
    batch = jax.tree.map(jnp.asarray, packed.batch)
    scores = np.asarray(jax.jit(lambda batch: token_logprobs(decoder, batch).logp)(batch))
    trained = packed.unpack(scores, [len(t.tokens) for t in trajectories])
    differences = np.concatenate(
        [np.abs(ours - t.logps) for ours, t in zip(trained, trajectories, strict=True)]
    )
    least, most = DIFFERENCE[weights]
    assert least <= differences.mean() <= most


def test_auto_packs_large_weights_in_bfloat16_if_the_processor_multiplies_it(world, large, monkeypatch):
    monkeypatch.setattr(cpu_backend, "supports_format", lambda name: True)
    assert formats(world, "auto") == ("bfloat16", "bfloat16")
    monkeypatch.setattr(cpu_backend, "supports_format", lambda name: name == "float32")
    assert formats(world, "auto") == ("float32", "float32")


def test_small_weights_are_packed_only_in_a_smaller_format(world, large, monkeypatch):
    monkeypatch.setattr(cpu_backend, "weights_dominate", lambda config: False)
    monkeypatch.setattr(cpu_backend, "supports_format", lambda name: True)
    assert formats(world, "auto") == formats(world, "float32") == (None, "float32")
    assert formats(world, "int8") == ("int8", "int8")


def test_unpacked_weights_are_not_copied(world, large):
    assert formats(world, "unpacked") == (None, "float32")


def test_other_devices_compute_products_in_the_dtype_of_the_computation():
    assert [Backend().product_format(dtype) for dtype in (jnp.bfloat16, jnp.float32)] == [
        "bfloat16",
        "float32",
    ]


def test_a_format_that_the_processor_lacks_is_refused_before_a_rollout(world, large, monkeypatch):
    monkeypatch.setattr(cpu_backend, "supports_format", lambda name: False)
    with pytest.raises(
        UserError, match=r"^weights=int8 of a rollout section needs a processor with AVX512_VNNI; set"
    ):
        sample(world, "int8")


def test_a_model_that_the_cpu_kernels_do_not_compute_is_refused(world, monkeypatch):
    monkeypatch.setattr(cpu_backend, "cpu_kernels", lambda *_: None)
    with pytest.raises(UserError, match=r"^weights=int8 of a rollout section needs the CPU kernels"):
        sample(world, "int8")
    with pytest.raises(UserError, match="weights='int4' is unknown"):
        EngineConfig(weights="int4")
