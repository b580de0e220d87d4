"""The models of a run as abstract arrays: shapes, dtypes and shardings on a mesh, nothing allocated. Read `ModelShapes` first."""

import dataclasses
import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import PyTree

from rrl.models.attention_backends import AttentionBackend
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder, cast_params
from rrl.models.hardware import ComputeConfig
from rrl.models.heads import ValueModel
from rrl.models.lora import add_lora
from rrl.parallel.rules import optimizer_shardings, shardings
from rrl.rl.optim import OptimConfig, make_optimizer, split_trained
from rrl.train.settings import TrainSettings

DecoderT = TypeVar("DecoderT", bound=Decoder)


@dataclasses.dataclass(frozen=True)
class CriticShapes:
    """PPO's critic as shapes on a mesh, in the dtype of the master weights."""

    graph: nnx.GraphDef
    params: PyTree
    """The trained parameters."""
    fixed: PyTree
    """The frozen parameters."""


@dataclasses.dataclass(frozen=True)
class ModelShapes:
    """A policy to be trained, as shapes on a mesh: ShapeDtypeStructs with their sharding."""

    config: DecoderConfig
    graph: nnx.GraphDef
    params: PyTree
    """The trained parameters, in the dtype of the master weights."""
    reference: PyTree
    """The reference's copy of the trained parameters, in the dtype of the computation."""
    fixed: PyTree
    """The frozen parameters, in the dtype of the computation; policy and reference share them."""
    critic: CriticShapes | None = None

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        settings: TrainSettings,
        mesh: Mesh | AbstractMesh,
        compute: ComputeConfig,
        attention: AttentionBackend,
    ) -> "ModelShapes":
        """Return the shapes for a run. Nothing is allocated.

        Args:
          config: architecture of the policy.
          settings: the run.
          mesh: devices, which may be abstract.
          compute: dtypes and rematerialisation, as returned by `ComputeConfig.for_platform`.
          attention: the attention implementation.
        """
        dtype = jnp.dtype(compute.dtype)

        def build(kind: type[DecoderT], config: DecoderConfig = config) -> DecoderT:
            return kind(
                config,
                rngs=nnx.Rngs(0),
                dtype=dtype,
                param_dtype=jnp.dtype(compute.param_dtype),
                remat=compute.remat,
                attention=attention,
            )

        def make() -> Decoder:
            decoder = build(Decoder)
            add_lora(decoder, settings.lora, rngs=nnx.Rngs(0))
            return decoder

        graph, params, fixed = split_trained(nnx.eval_shape(make), settings.train.optim.frozen)
        reference, fixed = jax.eval_shape(
            lambda *states: tuple(cast_params(state, dtype) for state in states), params, fixed
        )
        critic = None
        if (critic_config := settings.train.critic) is not None:
            value_model = nnx.eval_shape(lambda: build(ValueModel, critic_config.decoder_config(config)))
            critic_graph, *states = split_trained(value_model, critic_config.optim.frozen)
            critic = CriticShapes(critic_graph, *(_sharded(state, mesh) for state in states))
        params, reference, fixed = (_sharded(state, mesh) for state in (params, reference, fixed))
        return cls(config, graph, params, reference, fixed, critic)


def optimizer_state(optim: OptimConfig, params: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return the state of an optimiser as shapes on the mesh."""
    state = jax.eval_shape(make_optimizer(optim).init, params)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        optimizer_shardings(state, mesh),
    )


def device_bytes(tree: PyTree) -> float:
    """Return the bytes that shapes on a mesh take on each device."""
    return float(
        sum(
            np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=float) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(tree)
        )
    )


def parameter_count(state: PyTree) -> float:
    """Return the number of values in arrays or shapes, such as those of a model's parameters."""
    return float(sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)))


def _sharded(state: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return shapes with their sharding on the mesh."""
    places = shardings(state, mesh)
    flat = {
        path: leaf.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[path]))
        for path, leaf in nnx.to_flat_state(state)
    }
    return nnx.from_flat_state(flat)


def replicated(shape: tuple[int, ...], dtype: DTypeLike, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return the shape of an array of which each device of the mesh has a full copy."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
