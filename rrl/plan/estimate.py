"""Sizes and speeds by counting: operations of a training step, its roofline, and memory where nothing can be compiled."""

import dataclasses
from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh

from rrl.models.cache import BLOCK
from rrl.models.config import DecoderConfig, matrix_parameters
from rrl.parallel.mesh import data_shards
from rrl.parallel.topology import Chip
from rrl.plan.hlo import Traffic
from rrl.rl.logprobs import chunk_positions
from rrl.train.experiment import Settings

BF16, F32 = 2, 4


@dataclasses.dataclass(frozen=True)
class Workload:
    """What the mean trajectory is assumed to be; a run reports what it is (`tokens/...` in its metrics)."""

    tokens: int
    """All tokens of it."""
    policy_tokens: int
    """Those that the policy samples, one at a time."""

    @classmethod
    def of(cls, settings: Settings, tokens: int = 0, policy_tokens: int = 0) -> "Workload":
        """0: half the context, and a quarter of the trajectory."""
        tokens = tokens or settings.rollout.context // 2
        return cls(tokens, policy_tokens or tokens // 4)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """One part of a training step, over all chips."""

    flops: float
    memory_bytes: float
    """Read from the chips' memories, at least."""
    collective_bytes: float = 0.0
    """Bytes a chip receives in collectives."""

    def seconds(self, chip: Chip, chips: int) -> float:
        """The least time it takes: arithmetic, memory and links at their published speeds, the slowest of the three."""
        return max(
            self.flops / (chip.flops * chips),
            self.memory_bytes / (chip.bandwidth * chips),
            self.collective_bytes / chip.interconnect,
        )


def forward_flops(config: DecoderConfig, tokens: float, keys: float, scored: float) -> float:
    """Multiplications and additions of a forward pass in which each of `tokens` sees `keys` on average, `scored` of
    them through the head."""
    attention = 4 * config.layers * config.heads * config.head_dim * keys
    return (
        tokens * (2 * matrix_parameters(config) + attention) + scored * 2 * config.hidden * config.vocab_size
    )


def step_costs(
    settings: Settings,
    config: DecoderConfig,
    mesh: Mesh | AbstractMesh,
    workload: Workload,
    *,
    remat: str,
    trained: float,
    traffic: Mapping[str, Mapping[str, Traffic]],
) -> dict[str, StepCost]:
    """The parts of a training step. Loops are counted as often as they turn, unlike in XLA's own analysis."""
    episodes = settings.train.questions * settings.train.samples
    tokens, written = float(episodes * workload.tokens), float(episodes * workload.policy_tokens)
    mean_keys = workload.tokens / 2
    fed = tokens - written
    rows = settings.rollout.rows
    steps = written / min(rows, episodes)
    held = cache_bytes(config, rows, workload.tokens / 2, BF16)
    weights = BF16 * (matrix_parameters(config) + config.hidden * config.vocab_size)
    shards = data_shards(mesh)
    prefills = fed / (settings.rollout.feed_tokens * shards)
    rate = {name: sum(kind.bytes for kind in kinds.values()) for name, kinds in traffic.items()}
    length = settings.train.objective.lengths[-1]
    objective = settings.train.objective
    batches = max(1.0, tokens / (objective.rows(length, shards) * length))
    forward = forward_flops(config, tokens, mean_keys, written)
    # Forward, twice that back (once where weights are frozen), with remat forward again; and the reference, of which a reward
    # that pays for the KL asks once for all epochs.
    back = {"none": 3, "dots": 3, "full": 4}[remat]
    asked = 1 if objective.kl_in_reward else objective.epochs
    passes = objective.epochs * (back - (settings.lora.rank > 0)) + asked
    parts = {
        "rollout": StepCost(
            forward,
            steps * (weights + held) + prefills * weights,
            rate.get("decode", 0.0) * steps + rate.get("prefill", 0.0) * prefills,
        ),
        "update": StepCost(
            passes * forward,
            batches * passes * F32 / BF16 * weights,
            # The reference's own pass gathers the parameters once of the three times that an update moves them.
            rate.get("update", 0.0) * batches * (objective.epochs + objective.kl_in_reward / 3),
        ),
        "optimiser step": StepCost(
            objective.optimizer_steps * 12.0 * trained,
            objective.optimizer_steps * 7 * F32 * trained,  # reads p, g, m, v; writes p, m, v
            rate.get("optimiser step", 0.0) * objective.optimizer_steps,
        ),
    }
    if (critic := settings.train.critic) is not None:
        body = critic.body(config)
        headless = forward_flops(body, tokens, mean_keys, 0.0)
        times = critic.epochs * back + 1  # and once for the values before the update
        size = matrix_parameters(body) + config.hidden * config.vocab_size
        parts["critic update"] = StepCost(
            times * headless,
            batches * times * F32 * size,
            rate.get("critic update", 0.0) * batches * critic.epochs,
        )
        parts["critic step"] = StepCost(
            critic.optimizer_steps * 12.0 * size,
            critic.optimizer_steps * 7 * F32 * size,
            rate.get("critic step", 0.0) * critic.optimizer_steps,
        )
    return parts


def cache_bytes(config: DecoderConfig, rows: float, slots: float, itemsize: int) -> float:
    """Keys and values of all layers."""
    return 2.0 * config.layers * rows * slots * config.kv_heads * config.head_dim * itemsize


def cache_device_bytes(
    config: DecoderConfig, rows: int, context: int, itemsize: int, mesh: Mesh | AbstractMesh
) -> float:
    """The KV cache's share of a device: rows over (data, fsdp), kv heads over tensor where they divide."""
    slots = -(-context // BLOCK) * BLOCK
    heads = mesh.shape["tensor"] if config.kv_heads % mesh.shape["tensor"] == 0 else 1
    return cache_bytes(config, rows, slots, itemsize) / data_shards(mesh) / heads


def estimate_temporaries(
    settings: Settings,
    config: DecoderConfig,
    mesh: Mesh | AbstractMesh,
    *,
    remat: str,
    parameters: float,
    trained: float,
) -> dict[str, float]:
    """What each program needs beside its arguments on one device, by count; where a compiler can say it, it is not used.

    Rollout: a bfloat16 copy of the parameters, logits, the prefilled texts. Update: the new gradient, a bfloat16 copy, what
    the backward pass keeps of each layer, one layer's working set, the scores of one block of queries, a chunk of logits.
    """
    shards, tensor = data_shards(mesh), mesh.shape["tensor"]
    split = shards // mesh.shape["data"] * tensor
    chip_parameters = parameters / split
    vocabulary = config.vocab_size / (tensor if config.vocab_size % tensor == 0 else 1)
    width = (config.hidden * 6 + (config.mlp * 6 + config.heads * config.head_dim * 4) / tensor) * F32
    rows = settings.rollout.rows / shards
    fed = settings.rollout.feed_tokens
    layer = 2 * matrix_parameters(config) / config.layers / tensor * BF16
    in_rollout = BF16 * chip_parameters + 6 * rows * vocabulary * F32 + fed * width + layer
    length = settings.train.objective.lengths[-1]
    tokens = settings.train.objective.rows(length, shards) / shards * length
    kept = {
        "full": config.hidden,
        "dots": config.hidden * 3 + (config.heads * config.head_dim * 2 + config.mlp * 2) / tensor,
        "none": config.hidden * 8 + (config.heads * config.head_dim * 6 + config.mlp * 5) / tensor,
    }[remat]
    scores = 4 * tokens / 8 * length * config.heads / tensor * F32
    logits = 4 * min(chunk_positions(config.vocab_size, shards * tensor), tokens) * vocabulary * F32
    in_update = (
        BF16 * chip_parameters
        + F32 * trained / split
        + config.layers * tokens * kept * BF16
        + tokens * width
        + scores
        + logits
        + layer
        + 2 * config.hidden * vocabulary * F32
    )
    return {"rollout": in_rollout, "update": in_update, "optimiser step": F32 * trained / split}
