"""Estimates by counting: FLOPs of a training step, its roofline time, and memory if nothing can be
compiled."""

import dataclasses
from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh

from rrl.models.cache import BLOCK
from rrl.models.config import DecoderConfig, matrix_parameters
from rrl.parallel.mesh import data_shards
from rrl.parallel.topology import Chip
from rrl.plan.hlo import Traffic
from rrl.rl.logprobs import chunk_positions
from rrl.train.settings import TrainSettings

BF16, F32 = 2, 4


@dataclasses.dataclass(frozen=True)
class Workload:
    """The assumed mean trajectory. A run reports the real one as `tokens/...` in its metrics."""

    tokens: int
    """All its tokens."""
    policy_tokens: int
    """Tokens that the policy samples, one per decode step."""

    @classmethod
    def of(cls, settings: TrainSettings, tokens: int = 0, policy_tokens: int = 0) -> "Workload":
        """Return a workload. tokens=0: half the context. policy_tokens=0: a quarter of `tokens`."""
        tokens = tokens or settings.rollout.context // 2
        return cls(tokens, policy_tokens or tokens // 4)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The cost of one part of a training step. FLOPs and memory traffic are sums over all chips."""

    flops: float
    memory_bytes: float
    """Minimum number of bytes read from the chips' memories."""
    collective_bytes: float = 0.0
    """Bytes that one chip receives in collectives."""

    def seconds(self, chip: Chip, chips: int) -> float:
        """Return the roofline time: the largest of the times of arithmetic, memory and links at their published speeds."""
        return max(
            self.flops / (chip.flops * chips),
            self.memory_bytes / (chip.bandwidth * chips),
            self.collective_bytes / chip.interconnect,
        )


def forward_flops(config: DecoderConfig, tokens: float, keys: float, with_logits: float) -> float:
    """Return the FLOPs of a forward pass.

    Args:
      config: shape of the decoder.
      tokens: number of tokens.
      keys: mean number of keys that a token attends to in a layer without a window.
      with_logits: number of tokens whose logits are computed.
    """
    attention = 4 * config.layers * config.heads * config.head_dim * keys_per_layer(config, keys)
    return (
        tokens * (2 * matrix_parameters(config) + attention)
        + with_logits * 2 * config.hidden * config.vocab_size
    )


def keys_per_layer(config: DecoderConfig, keys: float) -> float:
    """Return how many of `keys` keys a token attends to, on average over the layers, some of which may have a sliding window.

    Of `keys` as a mean over tokens this is an upper bound.
    """
    return sum(min(window, keys) for window in config.windows) / config.layers if config.windows else keys


def step_costs(
    settings: TrainSettings,
    config: DecoderConfig,
    mesh: Mesh | AbstractMesh,
    workload: Workload,
    *,
    remat: str,
    trained: float,
    traffic: Mapping[str, Mapping[str, Traffic]],
) -> dict[str, StepCost]:
    """Return the cost of each part of a training step: rollout, update, optimiser step, and with PPO the
    critic's update and optimiser step.

    Each iteration of a loop counts. XLA's cost analysis, in contrast, counts a loop's body once.

    Args:
      settings: the run.
      config: shape of the policy.
      mesh: devices, which may be abstract.
      workload: the mean trajectory.
      remat: rematerialisation of the backward pass.
      trained: number of trained parameters.
      traffic: `CompiledProgram.traffic` of all programs, which is per execution; empty if nothing was compiled.
    """
    episodes = settings.train.questions * settings.train.samples
    tokens, policy_tokens = float(episodes * workload.tokens), float(episodes * workload.policy_tokens)
    mean_keys = workload.tokens / 2
    prefilled = tokens - policy_tokens
    rows = settings.rollout.rows
    decode_steps = policy_tokens / min(rows, episodes)
    cache = cache_bytes(config, rows, keys_per_layer(config, mean_keys), BF16)
    weights = BF16 * (matrix_parameters(config) + config.hidden * config.vocab_size)
    shards = data_shards(mesh)
    prefills = prefilled / (settings.rollout.prefill_tokens * shards)
    # Bytes that one chip receives in one execution.
    received = {name: sum(kind.bytes for kind in kinds.values()) for name, kinds in traffic.items()}
    length = settings.train.objective.row_lengths[-1]
    objective = settings.train.objective
    microbatches = max(1.0, tokens / (objective.rows_per_microbatch(length, shards) * length))
    forward = forward_flops(config, tokens, mean_keys, policy_tokens)
    # In units of a forward pass: forward 1, backward 2 (1 with frozen weights), recomputation 1 with full remat. The
    # reference policy adds its own forward passes: 1 per epoch, or 1 in total if the KL is part of the reward.
    forward_backward = {"none": 3, "dots": 3, "full": 4}[remat]
    reference = 1 if objective.kl_in_reward else objective.epochs
    passes = objective.epochs * (forward_backward - (settings.lora.rank > 0)) + reference
    parts = {
        "rollout": StepCost(
            forward,
            decode_steps * (weights + cache) + prefills * weights,
            received.get("decode", 0.0) * decode_steps + received.get("prefill", 0.0) * prefills,
        ),
        "update": StepCost(
            passes * forward,
            microbatches * passes * F32 / BF16 * weights,
            # The update gathers the parameters three times per microbatch. With the KL in the reward, the reference has a
            # separate forward pass, which gathers them once: a third of that.
            received.get("update", 0.0) * microbatches * (objective.epochs + objective.kl_in_reward / 3),
        ),
        "optimiser step": StepCost(
            objective.optimizer_steps * 12.0 * trained,  # 12: an estimate for one parameter
            objective.optimizer_steps
            * 7
            * F32
            * trained,  # reads parameters, gradient, m, v; writes parameters, m, v
            received.get("optimiser step", 0.0) * objective.optimizer_steps,
        ),
    }
    if (critic := settings.train.critic) is not None:
        body = critic.decoder_config(config)
        forward = forward_flops(body, tokens, mean_keys, 0.0)  # without logits
        critic_passes = critic.epochs * forward_backward + 1  # plus 1 for the values before the update
        size = matrix_parameters(body) + config.hidden * config.vocab_size
        parts["critic update"] = StepCost(
            critic_passes * forward,
            microbatches * critic_passes * F32 * size,
            received.get("critic update", 0.0) * microbatches * critic.epochs,
        )
        parts["critic step"] = StepCost(
            critic.optimizer_steps * 12.0 * size,
            critic.optimizer_steps * 7 * F32 * size,
            received.get("critic step", 0.0) * critic.optimizer_steps,
        )
    return parts


def cache_bytes(config: DecoderConfig, rows: float, slots: float, itemsize: int) -> float:
    """Return the bytes of the KV cache of all layers, for `rows` sequences of `slots` positions."""
    return 2.0 * config.layers * rows * slots * config.kv_heads * config.head_dim * itemsize


def cache_device_bytes(
    config: DecoderConfig, rows: int, context: int, itemsize: int, mesh: Mesh | AbstractMesh
) -> float:
    """Return the bytes of the KV cache on one device: rows are split over (data, fsdp), kv heads over
    tensor if they divide evenly."""
    slots = -(-context // BLOCK) * BLOCK
    heads = mesh.shape["tensor"] if config.kv_heads % mesh.shape["tensor"] == 0 else 1
    return cache_bytes(config, rows, slots, itemsize) / data_shards(mesh) / heads


def estimate_temporaries(
    settings: TrainSettings,
    config: DecoderConfig,
    mesh: Mesh | AbstractMesh,
    *,
    remat: str,
    parameters: float,
    trained: float,
) -> dict[str, float]:
    """Return the bytes that each program needs beside its arguments on one device. Used only if nothing
    can be compiled.

    Rollout: a copy of the parameters in bfloat16, logits, the activations of the prefill. Update: the
    new gradient, a copy of the parameters in bfloat16, the activations of each layer that the backward
    pass needs, all activations of one layer, the attention scores of one block of queries, one chunk of
    logits. The integer factors are estimates.

    Args:
      settings: the run.
      config: shape of the model.
      mesh: devices, which may be abstract.
      remat: rematerialisation of the backward pass.
      parameters: number of parameters.
      trained: number of trained parameters.
    """
    shards, tensor = data_shards(mesh), mesh.shape["tensor"]
    split = shards // mesh.shape["data"] * tensor  # number of devices that share one copy of the parameters
    chip_parameters = parameters / split
    vocabulary = config.vocab_size / (tensor if config.vocab_size % tensor == 0 else 1)
    token_bytes = (config.hidden * 6 + (config.mlp * 6 + config.heads * config.head_dim * 4) / tensor) * F32
    rows = settings.rollout.rows / shards
    prefill_tokens = settings.rollout.prefill_tokens
    layer = 2 * matrix_parameters(config) / config.layers / tensor * BF16
    in_rollout = BF16 * chip_parameters + 6 * rows * vocabulary * F32 + prefill_tokens * token_bytes + layer
    length = settings.train.objective.row_lengths[-1]
    tokens = settings.train.objective.rows_per_microbatch(length, shards) / shards * length
    residuals = {
        "full": config.hidden,
        "dots": config.hidden * 3 + (config.heads * config.head_dim * 2 + config.mlp * 2) / tensor,
        "none": config.hidden * 8 + (config.heads * config.head_dim * 6 + config.mlp * 5) / tensor,
    }[remat]
    scores = 4 * tokens / 8 * length * config.heads / tensor * F32
    logits = 4 * min(chunk_positions(config.vocab_size, shards * tensor), tokens) * vocabulary * F32
    in_update = (
        BF16 * chip_parameters
        + F32 * trained / split
        + config.layers * tokens * residuals * BF16
        + tokens * token_bytes
        + scores
        + logits
        + layer
        + 2 * config.hidden * vocabulary * F32
    )
    return {"rollout": in_rollout, "update": in_update, "optimiser step": F32 * trained / split}
