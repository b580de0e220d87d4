"""Compiles the programs of a run from shapes alone, for devices that need not be available.

They are the programs that a run executes: the rollout's episode loop with its host callback; the
gradient accumulation of one microbatch (log-probabilities of policy and reference, loss, backward
pass); the optimiser step; and with PPO the latter two for the critic. Forward-only programs (the
critic's values, the KL in the reward) need less memory and are not compiled.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import PyTree

from rrl.models.attention_backends import AttentionBackend
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder, Remat, cast_params
from rrl.models.heads import ValueModel
from rrl.models.lora import add_lora
from rrl.parallel.mesh import ROW_AXES, data_shards
from rrl.parallel.rules import optimizer_shardings, shardings
from rrl.plan.hlo import Traffic, collectives
from rrl.rl.accumulate import GradientAccumulator
from rrl.rl.batch import Batch
from rrl.rl.critic import Critic
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig, make_optimizer, split_trained
from rrl.rl.update import Updater
from rrl.rollout.automaton import compile_stops
from rrl.rollout.programs import DECODE_SCOPE, PREFILL_SCOPE, RolloutPrograms
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
        *,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        remat: Remat,
        attention: AttentionBackend,
    ) -> "ModelShapes":
        """Return the shapes for a run. Nothing is allocated."""

        def build(kind: type[DecoderT], config: DecoderConfig = config) -> DecoderT:
            return kind(
                config,
                rngs=nnx.Rngs(0),
                dtype=dtype,
                param_dtype=param_dtype,
                remat=remat,
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


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """What the compiler reports about one program; bytes are per device."""

    name: str
    compile_seconds: float = 0.0
    """Time of the compilation."""
    argument_bytes: float = 0.0
    temporary_bytes: float = 0.0
    """Peak memory beside the arguments, including the code."""
    flops: float = 0.0
    """As counted by XLA: the body of a loop counts once."""
    traffic: Mapping[str, Mapping[str, Traffic]] = dataclasses.field(default_factory=dict)
    """Part -> kind of collective -> traffic. The part is the program itself; for the rollout, one decode
    step and one prefill of all rows."""
    refusal: str = ""
    """The compiler's out-of-memory message if the program alone does not fit into a device's memory, else "".
    `argument_bytes` and `temporary_bytes` are then known, `flops` and `traffic` are not."""


def compile_rollout(settings: TrainSettings, model: ModelShapes, mesh: Mesh) -> CompiledProgram:
    """Compile the episode loop with its host callback, without a query encoder."""
    environment = settings.recipe.environment
    # Only the number of states of the automaton matters here, so a vocabulary of one empty token is enough.
    automaton = compile_stops(environment.stops, [b""])
    programs = RolloutPrograms(
        model.graph,
        model.config,
        settings.rollout,
        mesh,
        eos=np.zeros(1, np.int32),
        host_callback=_refuse_host_callback,
    )
    loop = programs.episode_loop(environment.turn_tokens, automaton.first_accept)
    key = jax.eval_shape(lambda: jax.random.key(0))
    table = (automaton.table.shape[0], model.config.vocab_size)
    params = nnx.merge_state(model.params, model.fixed)
    shapes = (
        params,
        None,  # state of the query encoder
        _replicated(key.shape, key.dtype, mesh),
        _replicated(table, jnp.int32, mesh),
        _replicated((), jnp.int32, mesh),
    )
    return _compile("rollout", loop, shapes, mesh, scopes={"decode": DECODE_SCOPE, "prefill": PREFILL_SCOPE})


def compile_update(settings: TrainSettings, model: ModelShapes, mesh: Mesh) -> CompiledProgram:
    """Compile the gradient accumulation of the largest microbatch: log-probabilities under the policy (and
    under the reference, unless the KL is part of the reward), loss, backward pass."""
    accumulator = _updater(settings, model).accumulator
    batch = _microbatch(settings.train.objective, settings.train.objective.extras, mesh)
    frozen = (model.reference, model.fixed)
    return _compile_accumulation("update", accumulator, model.params, frozen, batch, mesh)


def compile_optimizer_step(settings: TrainSettings, model: ModelShapes, mesh: Mesh) -> CompiledProgram:
    """Compile the optimiser step."""
    return _compile_optimizer(
        "optimiser step", _updater(settings, model).accumulator, settings.train.optim, model.params, mesh
    )


def compile_critic_update(settings: TrainSettings, model: ModelShapes, mesh: Mesh) -> CompiledProgram:
    """Compile values, loss and gradient of the largest microbatch for the critic."""
    critic, critic_shapes, _ = _critic(settings, model)
    batch = _microbatch(settings.train.objective, ("value", "return"), mesh)
    return _compile_accumulation(
        "critic update", critic.accumulator, critic_shapes.params, critic_shapes.fixed, batch, mesh
    )


def compile_critic_step(settings: TrainSettings, model: ModelShapes, mesh: Mesh) -> CompiledProgram:
    """Compile the step of the critic's optimiser."""
    critic, critic_shapes, optim = _critic(settings, model)
    return _compile_optimizer("critic step", critic.accumulator, optim, critic_shapes.params, mesh)


def optimizer_state(optim: OptimConfig, params: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return the state of an optimiser as shapes on the mesh."""
    state = jax.eval_shape(make_optimizer(optim).init, params)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
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


def _updater(settings: TrainSettings, model: ModelShapes) -> Updater:
    return Updater(model.graph, make_optimizer(settings.train.optim), settings.train.objective)


def _critic(settings: TrainSettings, model: ModelShapes) -> tuple[Critic, CriticShapes, OptimConfig]:
    config, critic_shapes = settings.train.critic, model.critic
    assert config is not None and critic_shapes is not None  # called only for runs with a critic
    critic = Critic(
        critic_shapes.graph,
        critic_shapes.fixed,
        make_optimizer(config.optim),
        config,
        settings.train.objective,
    )
    return critic, critic_shapes, config.optim


def _microbatch(objective: ObjectiveConfig, extras: Iterable[str], mesh: Mesh) -> Batch:
    """Return the largest microbatch as shapes on the mesh."""
    length = objective.row_lengths[-1]
    rows = objective.rows_per_microbatch(length, data_shards(mesh))
    split = NamedSharding(mesh, PartitionSpec(ROW_AXES))

    def array(dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, length), dtype, sharding=split)

    extra_arrays = {name: array(jnp.float32) for name in extras}
    branches = array(jnp.int32) if objective.share_prefixes else None
    return Batch(
        array(jnp.int32), array(jnp.int32), array(jnp.int32), array(jnp.bool_), extra_arrays, branches
    )


def _compile_accumulation(
    name: str, accumulator: GradientAccumulator, params: PyTree, frozen: PyTree, batch: Batch, mesh: Mesh
) -> CompiledProgram:
    sums = {key: _replicated((), jnp.float32, mesh) for key in accumulator.sum_names}
    return _compile(name, accumulator.accumulate, (params, frozen, params, sums, batch), mesh)


def _compile_optimizer(
    name: str, accumulator: GradientAccumulator, optim: OptimConfig, params: PyTree, mesh: Mesh
) -> CompiledProgram:
    shapes = (params, optimizer_state(optim, params, mesh), params, _replicated((), jnp.float32, mesh))
    return _compile(name, accumulator.apply, shapes, mesh)


def _compile(
    name: str, program: Any, shapes: tuple[Any, ...], mesh: Mesh, scopes: Mapping[str, str] | None = None
) -> CompiledProgram:
    began = time.perf_counter()
    try:
        with jax.set_mesh(mesh):
            compiled = program.lower(*shapes).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        arguments = device_bytes(shapes)
        # Total bytes in the messages of XLA's compilers, such as "Used 17.3G of 15.7G hbm".
        needed = re.search(r"(?:temporaries \(|Used )([\d.]+)([KMGT])", str(error))
        total = float(needed[1]) * 1024.0 ** (1 + "KMGT".index(needed[2])) if needed else float("inf")
        message = str(error).split("\n")[0]
        return CompiledProgram(
            name, time.perf_counter() - began, arguments, max(total - arguments, 0.0), refusal=message
        )
    # On TPU, the compiler refuses a program by its peak memory. The peak includes the arguments, but not the program's code.
    memory, text = compiled.memory_analysis(), compiled.as_text()
    temporary = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    if mesh.devices.flat[0].platform == "tpu":
        temporary = memory.peak_memory_in_bytes - memory.argument_size_in_bytes
    return CompiledProgram(
        name,
        time.perf_counter() - began,
        memory.argument_size_in_bytes,
        temporary + memory.generated_code_size_in_bytes,
        float((compiled.cost_analysis() or {}).get("flops", 0.0)),
        {part: collectives(text, scope) for part, scope in (scopes or {name: ""}).items()},
    )


def _sharded(state: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return shapes with their sharding on the mesh."""
    places = shardings(state, mesh)
    flat = {
        path: leaf.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[path]))
        for path, leaf in nnx.to_flat_state(state)
    }
    return nnx.from_flat_state(flat)


def _replicated(shape: tuple[int, ...], dtype: DTypeLike, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return a replicated shape."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def _refuse_host_callback(*message: Any) -> np.ndarray:
    raise RuntimeError("this rollout is only compiled; it must not be executed")


Compiler = Callable[[TrainSettings, ModelShapes, Mesh], CompiledProgram]
COMPILERS: tuple[Compiler, ...] = (compile_rollout, compile_update, compile_optimizer_step)
"""They compile the programs of every run."""
CRITIC_COMPILERS: tuple[Compiler, ...] = (compile_critic_update, compile_critic_step)
"""They compile the programs of PPO's critic."""
