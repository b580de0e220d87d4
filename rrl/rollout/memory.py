"""Memory that a rollout engine needs beside its model, counted without compiling. Read `engine_memory` first."""

import math
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from rrl.models.cache import BLOCK, layer_blocks
from rrl.models.config import DecoderConfig, matrix_parameters
from rrl.models.decoder import Decoder
from rrl.models.hf import read_decoder_config
from rrl.parallel.memory import device_memory, require_memory
from rrl.parallel.mesh import data_shards
from rrl.rl.memory import F32, token_activations
from rrl.rollout.backends import select_backend
from rrl.rollout.config import EngineConfig

LOGIT_COPIES = 6
"""Estimated number of arrays of the size of a decode step's logits that exist at the same time."""


def model_bytes(config: DecoderConfig, dtype: DTypeLike) -> float:
    """Return the bytes of a decoder's parameters in one dtype. Nothing is allocated."""
    shapes = nnx.eval_shape(lambda: nnx.state(Decoder(config, rngs=nnx.Rngs(0))))
    count = sum(math.prod(leaf.shape) for _, leaf in nnx.to_flat_state(shapes))
    return float(count * jnp.dtype(dtype).itemsize)


def folder_memory(
    folder: str | Path, engine: EngineConfig, mesh: Mesh | AbstractMesh, dtype: DTypeLike
) -> dict[str, float]:
    """Return part -> bytes on one device of a frozen model with its engine: parameters, KV cache and activations."""
    config = read_decoder_config(folder)
    split = math.prod(mesh.shape[axis] for axis in ("fsdp", "tensor"))
    return {"parameters": model_bytes(config, dtype) / split} | engine_memory(config, engine, mesh, dtype)


def require_inference_memory(
    models: Mapping[str, tuple[str | Path, EngineConfig]],
    mesh: Mesh,
    dtype: DTypeLike,
    fix: str = "use a smaller model, fewer rows or a smaller context",
) -> None:
    """Raise UserError, with the numbers, if frozen models that answer in turn need more memory than a device has.

    Args:
      models: config field -> folder and engine of its model, the policy first. A folder "" is skipped.
      mesh: devices of the models.
      dtype: of parameters and computation.
      fix: what to change, for the message.

    Raises:
      UserError: as `read_decoder_config`, or the memory does not suffice.
    """
    memory = {
        name: folder_memory(folder, engine, mesh, dtype)
        for name, (folder, engine) in models.items()
        if folder
    }
    needs = {f"parameters of {name}": parts.pop("parameters") for name, parts in memory.items()}
    engines: list[dict[str, float]] = list(memory.values())
    if not is_cpu(mesh):  # the estimate was compared with compiled programs on CPUs only
        engines = [{"KV cache": parts["KV cache"]} for parts in engines]
    largest: dict[str, float] = max(engines, key=lambda parts: sum(parts.values()))
    needs |= largest
    what = ", ".join(f"{name}={str(models[name][0])!r}" for name in memory)
    require_memory(needs, device_memory(mesh), what, fix)


def engine_memory(
    config: DecoderConfig,
    engine: EngineConfig,
    mesh: Mesh | AbstractMesh,
    dtype: DTypeLike,
    *,
    cast: float = 0.0,
    lora: bool = False,
) -> dict[str, float]:
    """Return part -> bytes on one device that an engine needs beside the parameters: the KV cache, and an estimate of the rest.

    The rest ("activations") consists of copies of parameters, logits, the activations of a prefill, and, except on a single CPU
    device, the gathered weights of two layers.

    Args:
      config: shape of the model.
      engine: sizes of the engine.
      mesh: devices, which may be abstract.
      dtype: dtype of the computation.
      cast: number of parameters on one device that are cast to `dtype`, because they are stored in another one.
      lora: whether the model has adapters.
    """
    size, shards, tensor = jnp.dtype(dtype).itemsize, data_shards(mesh), mesh.shape["tensor"]
    vocabulary = config.vocab_size / (tensor if config.vocab_size % tensor == 0 else 1)
    activations = size * cast
    activations += LOGIT_COPIES * engine.rows / shards * vocabulary * F32
    activations += engine.prefill_tokens * token_activations(config, tensor)
    if isinstance(mesh, Mesh):
        activations += select_backend(engine, config, mesh).prepared_bytes(dtype, lora)
    if not is_cpu(mesh) or mesh.size > 1:
        activations += size * 2 * matrix_parameters(config) / config.layers / tensor
    cache = cache_device_bytes(config, engine.slots, engine.context, size, mesh)
    return {"KV cache": cache, "activations": activations}


def is_cpu(mesh: Mesh | AbstractMesh) -> bool:
    """Return whether the devices of a mesh are CPUs; False for an abstract mesh."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"


def cache_bytes(config: DecoderConfig, rows: float, positions: float, itemsize: int) -> float:
    """Return the bytes of the KV cache of all layers, for `rows` sequences. `positions` is the mean number per layer."""
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
