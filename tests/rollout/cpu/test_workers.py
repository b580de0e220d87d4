"""Workers on a CPU: one if reading the weights dominates a decode step, else one per core."""

import dataclasses
from pathlib import Path

import jax
import pytest
from flax import nnx

from rrl.models.config import DecoderConfig
from rrl.models.weights import read_config
from rrl.rollout.config import EngineConfig
from rrl.rollout.cpu import workers
from tests.rollout.world import make_world

QWEN = DecoderConfig(
    vocab_size=151936, hidden=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp=4864, tie_embeddings=True
)
"""Qwen2.5-0.5B."""
ASSETS = Path(__file__).parents[3] / "assets"


def test_weight_bytes_count_all_matrices():
    decoder = make_world()[0]
    matrices = [leaf for leaf in jax.tree.leaves(nnx.state(decoder)) if leaf.ndim > 2 or leaf.shape[0] == 416]
    biases = sum(leaf.size for leaf in matrices if leaf.ndim == 3 and leaf.shape[-1] == 16)
    assert workers.weight_bytes(decoder.config) == 4 * (sum(leaf.size for leaf in matrices) - biases)


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_a_model_whose_weights_dominate_has_one_worker(monkeypatch, cores):
    monkeypatch.setattr(workers, "available_cores", lambda: cores)
    assert workers.weight_bytes(QWEN) == 4 * (24 * 14_909_440 + 896 * 151936)
    for rows in (16, 256):
        assert workers.worker_count(EngineConfig(rows=rows), QWEN) == 1
    assert workers.worker_count(EngineConfig(rows=16, workers=2), QWEN) == 2


@pytest.mark.parametrize("name", ["miniwiki-policy", "miniwiki-reader", "miniwiki-judge"])
def test_the_shipped_models_have_one_worker_per_core(monkeypatch, name):
    monkeypatch.setattr(workers, "available_cores", lambda: 4)
    shape = DecoderConfig.from_hf(read_config(ASSETS / name))
    counts = [workers.worker_count(EngineConfig(rows=rows), shape) for rows in (8, 16, 24, 32, 64)]
    assert counts == [1, 2, 3, 4, 4] and not workers.weights_dominate(shape)


def test_weight_bytes_include_the_output_embedding():
    shape = dataclasses.replace(QWEN, layers=1, mlp=16)
    assert workers.weights_dominate(shape)
    assert not workers.weights_dominate(dataclasses.replace(shape, vocab_size=4096))
