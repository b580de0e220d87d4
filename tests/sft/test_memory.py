"""Tests of the memory that supervised training needs."""

import jax
import pytest

from rrl.errors import UserError
from rrl.models.hardware import ComputeConfig
from rrl.models.hf import read_decoder_config
from rrl.models.lora import LoraConfig
from rrl.parallel.mesh import make_mesh
from rrl.rl.optim import OptimConfig
from rrl.sft import memory
from rrl.sft.config import SFTConfig

TRAINING = SFTConfig(steps=1, optim=OptimConfig(lr=0.1), rows=1, row_length=32)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_gradients_are_counted_on_every_device_and_activations_on_cpus(monkeypatch, on_cpu):
    arguments = (
        read_decoder_config("assets/miniwiki-policy"),
        TRAINING,
        ComputeConfig(dtype="float32"),
        LoraConfig(),
        make_mesh(devices=jax.devices()[:1]),
    )
    needs = memory.training_memory(*arguments)
    assert needs["gradients"] == needs["parameters"] > 0 and needs["activations"] > 0
    counted = sum(size for part, size in needs.items() if on_cpu or part != "activations")
    monkeypatch.setattr(memory, "is_cpu", lambda _: on_cpu)
    monkeypatch.setattr(memory, "device_memory", lambda _: counted)
    memory.require_training_memory(*arguments, model="m")
    monkeypatch.setattr(memory, "device_memory", lambda _: counted - 1)
    with pytest.raises(UserError, match=r"^m: the training of this model needs .* gradients "):
        memory.require_training_memory(*arguments, model="m")
