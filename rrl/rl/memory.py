"""Memory of a model in training, from shapes alone: its state, and an estimate of what an update needs beside it.

Read `update_temporaries` first.
"""

import math

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from rrl.models.attention import MAX_QUERY_BLOCKS
from rrl.models.config import DecoderConfig, matrix_parameters
from rrl.models.decoder import Remat
from rrl.parallel.mesh import data_shards
from rrl.parallel.rules import optimizer_shardings, shardings
from rrl.rl.logprobs import chunk_positions
from rrl.rl.optim import OptimConfig, make_optimizer

F32 = 4
"""Bytes of a float32."""


def update_temporaries(
    config: DecoderConfig,
    mesh: Mesh | AbstractMesh,
    states: tuple[PyTree, PyTree],
    dtype: np.dtype,
    remat: Remat,
    *,
    rows: float,
    length: int,
) -> float:
    """Return the estimated bytes that an update needs beside its arguments on one device.

    These are a copy of the parameters if they are cast, the new gradient, the activations of each layer that the backward pass
    needs, all activations of one layer, the attention scores of one block of queries, one chunk of logits, and on several devices
    the gathered weights of two layers and two gathered float32 matrices of the size of the embedding. The integer factors are
    estimates of how many arrays of a kind exist at the same time.

    Args:
      config: architecture of the model.
      mesh: devices, which may be abstract.
      states: the model's trained and frozen parameters, as shapes on the mesh.
      dtype: of the computation.
      remat: rematerialisation of the backward pass.
      rows: rows of a microbatch on one device.
      length: tokens of a row.
    """
    shards, tensor, size = data_shards(mesh), mesh.shape["tensor"], dtype.itemsize
    vocabulary = config.vocab_size / (tensor if config.vocab_size % tensor == 0 else 1)
    tokens = rows * length
    query_block = tokens / MAX_QUERY_BLOCKS
    scores = 4 * query_block * length * config.heads / tensor * F32
    logits = 4 * min(chunk_positions(config.vocab_size, shards * tensor), tokens) * vocabulary * F32
    gathered = 0.0
    if mesh.size > 1:
        gathered = 2 * matrix_parameters(config) / config.layers / tensor * size
        gathered += 2 * config.hidden * vocabulary * F32
    return (
        size * cast_values(states, dtype)
        + device_bytes(states[0])
        + config.layers * tokens * _residuals(config, remat, tensor) * size
        + tokens * token_activations(config, tensor)
        + scores
        + logits
        + gathered
    )


def _residuals(config: DecoderConfig, remat: str, tensor: int) -> float:
    """Return how many numbers per token and layer the forward pass stores for the backward pass, on one of `tensor` devices."""
    return {
        "full": config.hidden,
        "dots": config.hidden * 3 + (config.heads * config.head_dim * 2 + config.mlp * 2) / tensor,
        "none": config.hidden * 8 + (config.heads * config.head_dim * 6 + config.mlp * 5) / tensor,
    }[remat]


def token_activations(config: DecoderConfig, tensor: int) -> float:
    """Return the bytes of all activations of one token in one layer, on one of `tensor` devices."""
    return (config.hidden * 6 + (config.mlp * 6 + config.heads * config.head_dim * 4) / tensor) * F32


def cast_values(params: PyTree, dtype: np.dtype) -> float:
    """Return how many parameters on one device must be cast to the dtype of the computation."""
    return device_values([leaf for leaf in jax.tree.leaves(params) if leaf.dtype != dtype])


def optimizer_state(optim: OptimConfig, params: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return the state of an optimiser as shapes on the mesh."""
    state = jax.eval_shape(make_optimizer(optim).init, params)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        optimizer_shardings(state, mesh),
    )


def device_bytes(tree: PyTree) -> float:
    """Return the bytes on each device of arrays, given as shapes with shardings."""
    return sum(device_values(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_values(tree: PyTree) -> float:
    """Return the number of values on each device of arrays, given as shapes with shardings."""
    return float(
        sum(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=float) for leaf in jax.tree.leaves(tree))
    )


def parameter_count(state: PyTree) -> float:
    """Return the number of values in arrays or shapes, such as those of a model's parameters."""
    return float(sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)))


def sharded(state: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return shapes with their sharding on the mesh."""
    places = shardings(state, mesh)
    flat = {
        path: leaf.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[path]))
        for path, leaf in nnx.to_flat_state(state)
    }
    return nnx.from_flat_state(flat)
