"""Tests of the memory plan's parts."""

import dataclasses

import pytest
from jax.sharding import AbstractMesh

from rrl.models.config import DecoderConfig
from rrl.parallel.mesh import AXES
from rrl.plan.policy_shape import PUBLISHED
from rrl.plan.programs import CompiledProgram, compiled_temporaries
from rrl.rollout.memory import cache_device_bytes

BF16 = 2
"""Bytes of a bfloat16 number."""


@pytest.mark.parametrize("refusal", ["", "RESOURCE_EXHAUSTED: Used 26.0G of 15.7G hbm"])
def test_the_kv_cache_is_no_part_of_the_temporaries(refusal):
    rollout = CompiledProgram("rollout", temporary_bytes=26.0, refusal=refusal)
    found = compiled_temporaries([rollout, CompiledProgram("update", temporary_bytes=5.0)], cache=17.0)
    assert found == {"rollout": 9.0, "update": 5.0}


def test_the_cache_of_a_sliding_layer_counts_its_window_and_the_tokens_of_a_part():
    config = DecoderConfig.from_hf(PUBLISHED["gemma-3-4b"])
    assert config.sliding_layers.count(True) == 29 and config.sliding_window == 1024
    found = cache_device_bytes(config, 256, 8192, BF16, AbstractMesh((1, 4, 4), AXES))
    positions = 29 * 1280 + 5 * 8192  # 1024 + 255, rounded up to blocks of 128
    assert found == positions * 2 * BF16 * (256 / 4) * (4 / 4) * 256
    full = dataclasses.replace(config, sliding_layers=(), sliding_window=None)
    assert cache_device_bytes(full, 256, 8192, BF16, AbstractMesh((1, 4, 4), AXES)) == 17 * 2**30
