"""Tests of the memory that models need for rollouts, and of the refusal before they are loaded."""

from pathlib import Path

import jax
import pytest

from rrl.errors import UserError
from rrl.models.hf import read_decoder_config
from rrl.parallel.mesh import make_mesh
from rrl.rollout.config import EngineConfig
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
