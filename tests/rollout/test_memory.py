"""Tests of the memory that models need for rollouts, and of the refusal before they are loaded."""

import dataclasses
from pathlib import Path

import jax
import pytest
from flax import nnx

from rrl.errors import UserError
from rrl.models.config import matrix_parameters
from rrl.models.cpu.packed import supports_format
from rrl.models.decoder import Decoder
from rrl.models.hf import read_decoder_config
from rrl.parallel.mesh import make_mesh
from rrl.rollout.backends import select_backend
from rrl.rollout.config import EngineConfig
from rrl.rollout.cpu import backend as cpu_backend
from rrl.rollout.memory import engine_memory, folder_memory, model_bytes, require_inference_memory
from tests.memory import limit_memory

POLICY, READER = "assets/miniwiki-policy", "assets/miniwiki-reader"
SIZES = EngineConfig(rows=8, context=128, prefill_tokens=32)


@pytest.fixture
def mesh():
    return make_mesh(devices=jax.devices()[:1])


def test_parameters_and_cache_are_counted_exactly(mesh):
    config = read_decoder_config(POLICY)
    weights = Path(POLICY, "model.safetensors")
    assert model_bytes(config, "float32") == pytest.approx(weights.stat().st_size, rel=0.01)
    assert model_bytes(config, "bfloat16") == model_bytes(config, "float32") / 2
    memory = folder_memory(POLICY, SIZES, mesh, "float32")
    assert memory["KV cache"] == 2 * config.layers * 8 * 128 * config.kv_heads * config.head_dim * 4


def test_each_worker_copies_the_merged_kernels_and_a_tied_embedding(mesh):
    config = read_decoder_config(POLICY)
    plain, merged = (engine_memory(config, SIZES, mesh, "float32", lora=lora) for lora in (False, True))
    kernels = 4 * sum(
        config.layers * size
        for size in (
            2 * config.hidden * (config.heads + config.kv_heads) * config.head_dim,
            3 * config.hidden * config.mlp,
        )
    )
    assert merged["activations"] - plain["activations"] == kernels
    assert plain["activations"] > 4 * config.hidden * config.vocab_size * config.tie_embeddings


@pytest.mark.parametrize("vocabulary", [512, 500])
@pytest.mark.parametrize("weights", ["unpacked", "float32", "bfloat16", "int8"])
def test_packed_copies_are_counted_exactly(mesh, monkeypatch, weights, vocabulary):
    if weights != "unpacked" and not supports_format(weights):
        pytest.skip(f"this processor does not multiply {weights}")
    monkeypatch.setattr(cpu_backend, "weights_dominate", lambda config: True)
    config = dataclasses.replace(read_decoder_config(POLICY), vocab_size=vocabulary)
    backend = select_backend(dataclasses.replace(SIZES, weights=weights, workers=1), config, mesh)

    @jax.jit
    def copies():
        model = backend.prepare(Decoder(config, rngs=nnx.Rngs(0)))
        return dict(model.kernel_weights or {}), model.transposed_embedding

    held = sum(leaf.nbytes for leaf in jax.tree.leaves(copies()))
    size = {"unpacked": 0, "float32": 4, "bfloat16": 2, "int8": 1}[weights]
    table = config.hidden * vocabulary * (size if size and vocabulary == 512 else 4)
    values = size * matrix_parameters(config) + table  # int8 has scales and sums too
    assert held == values or (weights == "int8" and values < held < 1.2 * values)
    assert backend.prepared_bytes("float32", lora=False) == held > 0
    merged = 4 * matrix_parameters(config)
    with_adapters = backend.prepared_bytes("float32", lora=True)
    assert held < with_adapters <= held + merged


def test_models_that_answer_in_turn_share_room_for_the_largest_engine(tmp_path, monkeypatch, mesh):
    models = {"policy": (POLICY, SIZES), "reader": (READER, SIZES), "other": ("", SIZES)}
    policy, reader = (folder_memory(folder, SIZES, mesh, "float32") for folder in (POLICY, READER))
    parameters = policy.pop("parameters") + reader.pop("parameters")
    need = parameters + max(sum(policy.values()), sum(reader.values()))
    limit_memory(monkeypatch, tmp_path, int(need) + 1)
    require_inference_memory(models, mesh, "float32")
    (tmp_path / "groups" / "memory.max").write_text(f"{int(need) - 1}")
    with pytest.raises(
        UserError, match=rf"policy='{POLICY}', reader='{READER}' needs .* parameters of policy"
    ):
        require_inference_memory(models, mesh, "float32", "use less")
