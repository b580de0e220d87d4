"""Count the FLOPs and bytes of a training step, and its roofline time. Read `step_costs` first."""

import dataclasses
from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh

from rrl.models.config import DecoderConfig, matrix_parameters
from rrl.parallel.mesh import data_shards
from rrl.parallel.topology import Chip
from rrl.plan.hlo import Traffic
from rrl.rl.critic import CriticConfig
from rrl.rl.memory import F32
from rrl.rollout.memory import cache_bytes
from rrl.setup.settings import TrainSettings

BF16 = 2
"""Bytes of a bfloat16."""
UPDATE_PASSES: Mapping[str, int] = {"none": 3, "dots": 3, "full": 4}
"""Rematerialisation -> cost of forward and backward pass, in forward passes: forward 1, backward 2, recomputation 1 with full
rematerialisation."""
OPTIMIZER_FLOPS = 12.0
"""Estimated FLOPs of an optimiser step per parameter."""
OPTIMIZER_ACCESSES = 7
"""Float32 values per parameter that an optimiser step reads (parameter, gradient, m, v) and writes (parameter, m, v)."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """The assumed mean trajectory. A run reports the real one as `tokens/...` in its metrics."""

    tokens: int
    """Number of its tokens."""
    policy_tokens: int
    """How many of them the policy samples, one per decode step."""

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
    """Minimum number of bytes that the chips read from their memories; for an optimiser step also those that they write."""
    collective_bytes: float = 0.0
    """Size of the results of the collectives on one chip. It stands for the bytes that the chip receives."""

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
      config: architecture of the decoder.
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

    If `keys` is itself a mean over tokens, the result is an upper bound, since min(window, keys) is concave in keys.
    """
    return sum(min(window, keys) for window in config.windows) / config.layers if config.windows else keys


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """What a training step processes and how often its programs run."""

    tokens: float
    """Tokens of all trajectories."""
    policy_tokens: float
    """Those among them that the policy samples."""
    mean_keys: float
    """Mean number of keys that a token attends to in a layer without a window."""
    decode_steps: float
    """Number of decode steps if every row of the rollout is always busy: a lower bound. A decode step samples one token in each
    busy row."""
    prefills: float
    """Number of prefills if each one is full: a lower bound."""
    microbatches: float

    @classmethod
    def of(cls, settings: TrainSettings, workload: Workload, shards: int) -> "StepCounts":
        """Count for a run whose batches are split over `shards` devices."""
        episodes = settings.train.questions * settings.train.samples
        tokens, policy_tokens = float(episodes * workload.tokens), float(episodes * workload.policy_tokens)
        objective = settings.train.objective
        length = objective.row_lengths[-1]
        return cls(
            tokens=tokens,
            policy_tokens=policy_tokens,
            mean_keys=workload.tokens / 2,
            decode_steps=policy_tokens / min(settings.rollout.rows, episodes),
            prefills=(tokens - policy_tokens) / (settings.rollout.prefill_tokens * shards),
            microbatches=max(1.0, tokens / (objective.rows_per_microbatch(length, shards) * length)),
        )


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
    """Return the cost of each part of a training step: rollout, update, optimiser step, and with PPO the critic's update and
    optimiser step.

    Each iteration of a loop counts. XLA's cost analysis, in contrast, counts a loop's body once.

    Args:
      settings: the run.
      config: architecture of the policy.
      mesh: devices, which may be abstract.
      workload: the mean trajectory.
      remat: rematerialisation of the backward pass.
      trained: number of trained parameters.
      traffic: `CompiledProgram.traffic` of all programs, which is per execution; empty if nothing was compiled.
    """
    counts = StepCounts.of(settings, workload, data_shards(mesh))
    # Size of the collectives' results on one chip in one execution.
    received = {name: sum(kind.bytes for kind in kinds.values()) for name, kinds in traffic.items()}
    forward = forward_flops(config, counts.tokens, counts.mean_keys, counts.policy_tokens)
    weights = BF16 * (matrix_parameters(config) + config.hidden * config.vocab_size)
    cache = cache_bytes(config, settings.rollout.rows, keys_per_layer(config, counts.mean_keys), BF16)
    costs = {
        "rollout": StepCost(
            forward,
            counts.decode_steps * (weights + cache) + counts.prefills * weights,
            received.get("decode", 0.0) * counts.decode_steps
            + received.get("prefill", 0.0) * counts.prefills,
        ),
        "update": _update_cost(settings, counts, forward, weights, remat, received.get("update", 0.0)),
        "optimiser step": _optimizer_cost(
            settings.train.objective.optimizer_steps, trained, received.get("optimiser step", 0.0)
        ),
    }
    if (critic := settings.train.critic) is not None:
        body = critic.decoder_config(config)
        size = matrix_parameters(body) + config.hidden * config.vocab_size
        costs["critic update"] = _critic_update_cost(
            critic, body, counts, size, remat, received.get("critic update", 0.0)
        )
        costs["critic step"] = _optimizer_cost(critic.optimizer_steps, size, received.get("critic step", 0.0))
    return costs


def _update_cost(
    settings: TrainSettings, counts: StepCounts, forward: float, weights: float, remat: str, received: float
) -> StepCost:
    """Return the cost of the policy's gradients, with the reference's forward passes.

    Args:
      settings: the run.
      counts: of the training step.
      forward: FLOPs of one forward pass over all tokens.
      weights: bytes of the parameters in bfloat16.
      remat: rematerialisation of the backward pass.
      received: size of the collectives' results on one chip in the update of one microbatch, in bytes.
    """
    objective = settings.train.objective
    # With frozen weights the backward pass costs one forward pass less. The reference has one forward pass per epoch, or one in
    # total if the KL is part of the reward.
    reference = 1 if objective.kl_in_reward else objective.epochs
    passes = objective.epochs * (UPDATE_PASSES[remat] - (settings.lora.rank > 0)) + reference
    return StepCost(
        passes * forward,
        counts.microbatches * passes * F32 / BF16 * weights,
        # The update gathers the parameters three times per microbatch. With the KL in the reward, the reference has a separate
        # forward pass, which gathers them once: a third of that.
        received * counts.microbatches * (objective.epochs + objective.kl_in_reward / 3),
    )


def _critic_update_cost(
    critic: CriticConfig, body: DecoderConfig, counts: StepCounts, size: float, remat: str, received: float
) -> StepCost:
    """Return the cost of the critic's gradients and of its values before the update.

    `body` is the critic's architecture, `size` its number of parameters, and `received` the size of the collectives' results on
    one chip in the update of one microbatch, in bytes.
    """
    forward = forward_flops(body, counts.tokens, counts.mean_keys, 0.0)  # without logits
    passes = critic.epochs * UPDATE_PASSES[remat] + 1  # plus 1 for the values before the update
    return StepCost(
        passes * forward,
        counts.microbatches * passes * F32 * size,
        received * counts.microbatches * critic.epochs,
    )


def _optimizer_cost(steps: int, parameters: float, received: float) -> StepCost:
    """Return the cost of `steps` optimiser steps. `received`: bytes of the collectives' results on one chip in each."""
    return StepCost(
        steps * OPTIMIZER_FLOPS * parameters,
        steps * OPTIMIZER_ACCESSES * F32 * parameters,
        received * steps,
    )
