"""Shapes and plans for the tests of this folder."""

import dataclasses

from jax.sharding import AbstractMesh

from configs.rsearch_grpo import get_config
from rrl.models.config import DecoderConfig
from rrl.parallel.mesh import AXES
from rrl.parallel.topology import CHIPS, GIB, Topology
from rrl.plan.capacity import CapacityPlan
from rrl.plan.costs import Workload
from rrl.plan.policy_shape import PUBLISHED
from rrl.setup.settings import TrainSettings

SEVEN = DecoderConfig.from_hf(PUBLISHED["Qwen2.5-7B"])
TINY = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
STATE = {"parameters": 1, "reference": 1, "optimiser state": 2}
"""GiB of model and optimiser state on each device."""


def made(memory, sizes=(1, 4, 4), remat="full", spare=0, **objective):
    """Return a plan of the 7B run on v5e:4x4 with made-up memory, in GiB."""
    config = get_config("size=7b")
    config.rollout.oversubscribed_slots = spare
    settings = TrainSettings.parse(config)
    train = dataclasses.replace(
        settings.train, objective=dataclasses.replace(settings.train.objective, **objective)
    )
    return CapacityPlan(
        dataclasses.replace(settings, train=train),
        Topology("v5e:4x4", CHIPS["v5e"], 16, None),
        AbstractMesh(sizes, AXES),
        SEVEN,
        "here",
        7.6e9,
        7.6e9,
        "bfloat16",
        remat,
        "splash",
        {phase: {part: size * GIB for part, size in parts.items()} for phase, parts in memory.items()},
        [],
        {},
        Workload(4096, 1024),
    )
