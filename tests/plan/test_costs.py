"""Tests of counted FLOPs and of the roofline time."""

import dataclasses

import pytest
from jax.sharding import AbstractMesh

from configs.rsearch_grpo import get_config
from rrl.models.config import DecoderConfig, matrix_parameters
from rrl.parallel.mesh import AXES
from rrl.parallel.topology import CHIPS
from rrl.plan.costs import StepCost, Workload, forward_flops, keys_per_layer, step_costs
from rrl.plan.policy_shape import PUBLISHED
from rrl.setup.settings import TrainSettings
from tests.plan.plans import SEVEN, TINY


def test_forward_flops_equal_a_count_by_hand():
    config = DecoderConfig.from_hf(TINY)
    assert matrix_parameters(config) == 16 * (2 + 2 + 2) * 8 + 16 * 2 * 8 + 3 * 16 * 32
    by_hand = 10 * 2 * matrix_parameters(config) + 10 * (2 * 5 * 8 + 2 * 5 * 8) * 2 + 3 * 2 * 16 * 64
    assert forward_flops(config, 10, 5, 3) == by_hand


def test_keys_outside_a_sliding_window_cost_nothing():
    config = DecoderConfig.from_hf(PUBLISHED["gemma-3-1b"])
    assert config.sliding_layers.count(False) == 4
    assert keys_per_layer(config, 4096) == (4 * 4096 + 22 * 512) / 26
    assert keys_per_layer(config, 100) == 100
    full = dataclasses.replace(config, sliding_layers=(), sliding_window=None)
    saved = forward_flops(full, 10, 4096, 3) - forward_flops(config, 10, 4096, 3)
    assert saved == pytest.approx(10 * 22 * 4 * (4096 - 512) * 4 * 256)


def test_the_roofline_is_the_slowest_of_arithmetic_memory_and_links():
    chip = CHIPS["v5e"]
    assert StepCost(2 * 197e12, 1, 1).seconds(chip, 2) == pytest.approx(1)
    assert StepCost(1, 3 * 819e9, 1).seconds(chip, 1) == pytest.approx(3)
    assert StepCost(1, 1, 400e9).seconds(chip, 16) == pytest.approx(2)


def test_full_remat_costs_one_more_forward_pass():
    settings, mesh = TrainSettings.parse(get_config("size=7b")), AbstractMesh((1, 4, 4), AXES)
    work = Workload.of(settings)
    full, none = (
        step_costs(settings, SEVEN, mesh, work, remat=remat, trained=7e9, traffic={})["update"].flops
        for remat in ("full", "none")
    )
    assert full / none == pytest.approx(5 / 4)
