"""The models of a run as abstract arrays: shapes, dtypes and shardings on a mesh, nothing allocated. Read `ModelShapes` first."""

import dataclasses
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
from rrl.rl.memory import sharded
from rrl.rl.optim import split_trained
from rrl.setup.settings import TrainSettings

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
    compute: ComputeConfig
    """Dtypes and rematerialisation."""
    graph: nnx.GraphDef
    params: PyTree
    """The trained parameters, in the dtype of the master weights."""
    reference: PyTree
    """The reference's copy of the trained parameters, in the dtype of the computation."""
    fixed: PyTree
    """The frozen parameters, in the dtype of the computation; policy and reference share them."""
    critic: CriticShapes | None = None

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the computation."""
        return jnp.dtype(self.compute.dtype)

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
            critic = CriticShapes(critic_graph, *(sharded(state, mesh) for state in states))
        params, reference, fixed = (sharded(state, mesh) for state in (params, reference, fixed))
        return cls(config, compute, graph, params, reference, fixed, critic)


def replicated(shape: tuple[int, ...], dtype: DTypeLike, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return the shape of an array of which each device of the mesh has a full copy."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
