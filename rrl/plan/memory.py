"""Memory of a run on one device: the parts of each phase. Read `phase_memory` first."""

from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh

from rrl.models.attention import MAX_QUERY_BLOCKS
from rrl.models.cache import BLOCK, layer_blocks
from rrl.models.config import DecoderConfig, matrix_parameters
from rrl.parallel.mesh import data_shards
from rrl.plan.programs import CompiledProgram
from rrl.plan.shapes import ModelShapes, device_bytes, optimizer_state, parameter_count
from rrl.rl.logprobs import chunk_positions
from rrl.train.settings import TrainSettings

BF16, F32 = 2, 4
"""Bytes of a number."""


def phase_memory(
    settings: TrainSettings,
    model: ModelShapes,
    mesh: Mesh | AbstractMesh,
    cache: float,
    temporaries: Mapping[str, float],
) -> dict[str, dict[str, float]]:
    """Return phase -> part -> bytes on one device.

    Args:
      settings: the run.
      model: policy, reference and critic.
      mesh: devices, which may be abstract.
      cache: bytes of the KV cache on one device.
      temporaries: phase -> bytes that its program needs beside its arguments and the KV cache.
    """
    state = _state_memory(settings, model, mesh)
    gradients = {"gradients": device_bytes(model.params)}
    memory = {
        "rollout": state | {"KV cache": cache, "activations": max(temporaries["rollout"], 0.0)},
        "update": state | gradients | {"activations": temporaries["update"]},
        "optimiser step": state | gradients | {"activations": temporaries["optimiser step"]},
    }
    if model.critic is not None:
        gradients = {"gradients": device_bytes(model.critic.params)}
        memory |= {
            phase: state | gradients | {"activations": temporaries[phase]}
            for phase in ("critic update", "critic step")
        }
    return memory


def _state_memory(settings: TrainSettings, model: ModelShapes, mesh: Mesh | AbstractMesh) -> dict[str, float]:
    """Return part -> bytes of the models and the optimisers' states, which every phase needs."""
    state = {
        "parameters": device_bytes(model.params) + device_bytes(model.fixed),
        "reference": device_bytes(model.reference),
        "optimiser state": device_bytes(optimizer_state(settings.train.optim, model.params, mesh)),
    }
    critic = model.critic
    if critic is not None and settings.train.critic is not None:
        optim = optimizer_state(settings.train.critic.optim, critic.params, mesh)
        state |= {
            "critic": device_bytes(critic.params) + device_bytes(critic.fixed),
            "critic's optimiser": device_bytes(optim),
        }
    return state


def compiled_temporaries(compiled: list[CompiledProgram], cache: float) -> dict[str, float]:
    """Return phase -> bytes beside the arguments, as compiled. `compiled` begins with the rollout.

    The rollout allocates the KV cache itself, so the compiler counts the cache among the temporaries, also if it refuses the
    program. The report shows the cache as a separate part, so it is subtracted here.
    """
    temporaries = {program.name: program.temporary_bytes for program in compiled}
    temporaries["rollout"] = max(temporaries["rollout"] - cache, 0.0)
    return temporaries


def estimated_temporaries(
    settings: TrainSettings, model: ModelShapes, mesh: Mesh | AbstractMesh, remat: str
) -> dict[str, float]:
    """Return phase -> estimated bytes beside the arguments on one device, for the policy and the critic.

    It is used if nothing can be compiled.
    """
    counts = [parameter_count(part) for part in (model.params, model.fixed)]
    temporaries = _model_temporaries(
        settings, model.config, mesh, remat=remat, parameters=sum(counts), trained=counts[0]
    )
    critic = model.critic
    if critic is not None and settings.train.critic is not None:
        counts = [parameter_count(part) for part in (critic.params, critic.fixed)]
        body = settings.train.critic.decoder_config(model.config)
        critic_temporaries = _model_temporaries(
            settings, body, mesh, remat=remat, parameters=sum(counts), trained=counts[0]
        )
        temporaries |= {
            "critic update": critic_temporaries["update"],
            "critic step": critic_temporaries["optimiser step"],
        }
    return temporaries


def cache_bytes(config: DecoderConfig, rows: float, positions: float, itemsize: int) -> float:
    """Return the bytes of the KV cache of all layers, for `rows` sequences of `positions` positions, on average over layers."""
    return 2.0 * config.layers * rows * positions * config.kv_heads * config.head_dim * itemsize


def cache_device_bytes(
    config: DecoderConfig, rows: int, context: int, itemsize: int, mesh: Mesh | AbstractMesh
) -> float:
    """Return the bytes of the KV cache on one device.

    `rows` is the number of cached sequences: the rollout's rows and oversubscribed slots. They are split over (data, fsdp), and
    kv heads over tensor if they divide evenly. Layers with a sliding window hold only their last positions.
    """
    positions = BLOCK * sum(layer_blocks(config, context)) / config.layers
    head_shards = mesh.shape["tensor"] if config.kv_heads % mesh.shape["tensor"] == 0 else 1
    return cache_bytes(config, rows, positions, itemsize) / data_shards(mesh) / head_shards


def _model_temporaries(
    settings: TrainSettings,
    config: DecoderConfig,
    mesh: Mesh | AbstractMesh,
    *,
    remat: str,
    parameters: float,
    trained: float,
) -> dict[str, float]:
    """Return the estimated bytes that each program of one model needs beside its arguments on one device.

    The integer factors are estimates of how many arrays of a kind exist at the same time.

    - Rollout: a copy of the parameters in bfloat16, logits, the activations of the prefill, the gathered weights of two layers.
    - Update: a copy of the parameters in bfloat16, the new gradient, the activations of each layer that the backward pass needs,
      all activations of one layer, the attention scores of one block of queries, one chunk of logits, the gathered weights of two
      layers, and two gathered float32 matrices of the size of the embedding.
    - Optimiser step: the new gradient.

    Args:
      settings: the run.
      config: architecture of the model.
      mesh: devices, which may be abstract.
      remat: rematerialisation of the backward pass.
      parameters: number of parameters.
      trained: number of trained parameters.
    """
    shards, tensor = data_shards(mesh), mesh.shape["tensor"]
    split = shards // mesh.shape["data"] * tensor  # number of devices that share one copy of the parameters
    chip_parameters = parameters / split
    vocabulary = config.vocab_size / (tensor if config.vocab_size % tensor == 0 else 1)
    # Bytes of all activations of one token in one layer.
    activation_bytes = (
        config.hidden * 6 + (config.mlp * 6 + config.heads * config.head_dim * 4) / tensor
    ) * F32
    rows = settings.rollout.rows / shards
    prefill_tokens = settings.rollout.prefill_tokens
    two_layers = 2 * matrix_parameters(config) / config.layers / tensor * BF16
    in_rollout = (
        BF16 * chip_parameters + 6 * rows * vocabulary * F32 + prefill_tokens * activation_bytes + two_layers
    )
    length = settings.train.objective.row_lengths[-1]
    tokens = settings.train.objective.rows_per_microbatch(length, shards) / shards * length
    query_block = tokens / MAX_QUERY_BLOCKS
    scores = 4 * query_block * length * config.heads / tensor * F32
    logits = 4 * min(chunk_positions(config.vocab_size, shards * tensor), tokens) * vocabulary * F32
    in_update = (
        BF16 * chip_parameters
        + F32 * trained / split
        + config.layers * tokens * _residuals(config, remat, tensor) * BF16
        + tokens * activation_bytes
        + scores
        + logits
        + two_layers
        + 2 * config.hidden * vocabulary * F32
    )
    return {"rollout": in_rollout, "update": in_update, "optimiser step": F32 * trained / split}


def _residuals(config: DecoderConfig, remat: str, tensor: int) -> float:
    """Return how many numbers per token and layer the forward pass stores for the backward pass, on one of `tensor` devices."""
    return {
        "full": config.hidden,
        "dots": config.hidden * 3 + (config.heads * config.head_dim * 2 + config.mlp * 2) / tensor,
        "none": config.hidden * 8 + (config.heads * config.head_dim * 6 + config.mlp * 5) / tensor,
    }[remat]
