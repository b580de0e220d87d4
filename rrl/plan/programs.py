"""The programs of a run, compiled from shapes alone for devices that need not be there.

These are the programs that a run executes: the rollout's episode loop with its host callback, the accumulation of one
microbatch's gradient (policy and reference log-probabilities, loss, backward pass) and the optimiser's step; with PPO, the
same two of the critic. What only goes forward (the critic's values, the KL in the reward) needs less than these.
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

from rrl.models.attention_backends import Backend
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder, Remat, computed
from rrl.models.heads import ValueModel
from rrl.models.lora import add_lora
from rrl.parallel.mesh import ROW_AXES, data_shards
from rrl.parallel.rules import optimizer_shardings, shardings
from rrl.plan.hlo import Traffic, collectives
from rrl.rl.accumulate import Descent
from rrl.rl.batch import Batch
from rrl.rl.critic import Critic
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig, make_optimizer, split_trained
from rrl.rl.update import Updater
from rrl.rollout.automaton import compile_stops
from rrl.rollout.loop import DECODE, PREFILL, Programs
from rrl.train.experiment import Settings

DecoderT = TypeVar("DecoderT", bound=Decoder)


@dataclasses.dataclass(frozen=True)
class CriticShapes:
    """PPO's critic as shapes on a mesh, all of it in the dtype of the master weights."""

    graph: nnx.GraphDef
    params: PyTree
    """What is trained."""
    fixed: PyTree


@dataclasses.dataclass(frozen=True)
class ModelShapes:
    """A model to be trained, as shapes on a mesh: ShapeDtypeStructs with their placement."""

    config: DecoderConfig
    graph: nnx.GraphDef
    params: PyTree
    """What is trained, in the dtype of the master weights."""
    reference: PyTree
    """What is trained as it was at the start, in the dtype of the computation."""
    fixed: PyTree
    """The others, in the dtype of the computation; both models share them."""
    critic: CriticShapes | None = None

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        settings: Settings,
        mesh: Mesh | AbstractMesh,
        *,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        remat: Remat,
        attention: Backend,
    ) -> "ModelShapes":
        """Nothing is allocated."""

        def body(kind: type[DecoderT], config: DecoderConfig = config) -> DecoderT:
            return kind(
                config,
                rngs=nnx.Rngs(0),
                dtype=dtype,
                param_dtype=param_dtype,
                remat=remat,
                attention=attention,
            )

        def make() -> Decoder:
            decoder = body(Decoder)
            add_lora(decoder, settings.lora, rngs=nnx.Rngs(0))
            return decoder

        graph, params, fixed = split_trained(nnx.eval_shape(make), settings.train.optim.frozen)
        reference, fixed = jax.eval_shape(
            lambda *states: tuple(computed(state, dtype) for state in states), params, fixed
        )
        critic = None
        if (asked := settings.train.critic) is not None:
            value_model = nnx.eval_shape(lambda: body(ValueModel, asked.body(config)))
            head, *states = split_trained(value_model, asked.optim.frozen)
            critic = CriticShapes(head, *(_placed(state, mesh) for state in states))
        params, reference, fixed = (_placed(state, mesh) for state in (params, reference, fixed))
        return cls(config, graph, params, reference, fixed, critic)


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """What the compiler says of one program; bytes of one device."""

    name: str
    compile_seconds: float = 0.0
    """Time to compile it."""
    argument_bytes: float = 0.0
    temporary_bytes: float = 0.0
    """All else that lives at the fullest moment, code included."""
    flops: float = 0.0
    """As XLA counts them: the body of a loop once."""
    traffic: Mapping[str, Mapping[str, Traffic]] = dataclasses.field(default_factory=dict)
    """Collectives by what they belong to: the program, or in the rollout one decoded token and one prefill of all rows."""
    refusal: str = ""
    """What the compiler said where the program alone does not fit; then it tells no sizes but `temporary_bytes`."""


def rollout(settings: Settings, model: ModelShapes, mesh: Mesh) -> CompiledProgram:
    """The episode loop with its callback, without a query encoder."""
    environment = settings.recipe.environment
    automaton = compile_stops(environment.stops, [b""])
    programs = Programs(
        model.graph,
        model.config,
        settings.rollout,
        mesh,
        eos=np.zeros(1, np.int32),
        answer=_no_host,
    )
    loop = programs.episode_loop(environment.turn_tokens, automaton.first_accept)
    key = jax.eval_shape(lambda: jax.random.key(0))
    table = (automaton.table.shape[0], model.config.vocab_size)
    params = nnx.merge_state(model.params, model.fixed)
    shapes = (
        params,
        None,
        _whole(key.shape, key.dtype, mesh),
        _whole(table, jnp.int32, mesh),
        _whole((), jnp.int32, mesh),
    )
    return _compile("rollout", loop, shapes, mesh, scopes={"decode": DECODE, "prefill": PREFILL})


def accumulate(settings: Settings, model: ModelShapes, mesh: Mesh) -> CompiledProgram:
    """Log-probabilities under the policy, and under the reference where the reward has not asked for them, loss and gradient of
    the largest microbatch."""
    descent = _updater(settings, model).descent
    batch = _microbatch(settings.train.objective, settings.train.objective.extras, mesh)
    frozen = (model.reference, model.fixed)
    return _accumulate("update", descent, model.params, frozen, batch, mesh)


def apply(settings: Settings, model: ModelShapes, mesh: Mesh) -> CompiledProgram:
    """The optimiser's step."""
    return _apply(
        "optimiser step", _updater(settings, model).descent, settings.train.optim, model.params, mesh
    )


def critic_accumulate(settings: Settings, model: ModelShapes, mesh: Mesh) -> CompiledProgram:
    """Values, loss and gradient of the largest microbatch."""
    critic, critic_shapes, _ = _critic(settings, model)
    batch = _microbatch(settings.train.objective, ("value", "return"), mesh)
    return _accumulate(
        "critic update", critic.descent, critic_shapes.params, critic_shapes.fixed, batch, mesh
    )


def critic_apply(settings: Settings, model: ModelShapes, mesh: Mesh) -> CompiledProgram:
    """The step of the critic's optimiser."""
    critic, critic_shapes, optim = _critic(settings, model)
    return _apply("critic step", critic.descent, optim, critic_shapes.params, mesh)


def optimizer_state(optim: OptimConfig, params: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """An optimiser's state as shapes on the mesh."""
    state = jax.eval_shape(make_optimizer(optim).init, params)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        state,
        optimizer_shardings(state, mesh),
    )


def device_bytes(tree: PyTree) -> float:
    """Bytes that shapes on a mesh take on each device."""
    return float(
        sum(
            np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=float) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(tree)
        )
    )


def _updater(settings: Settings, model: ModelShapes) -> Updater:
    return Updater(model.graph, make_optimizer(settings.train.optim), settings.train.objective)


def _critic(settings: Settings, model: ModelShapes) -> tuple[Critic, CriticShapes, OptimConfig]:
    config, critic_shapes = settings.train.critic, model.critic
    assert config is not None and critic_shapes is not None  # what is called has a critic
    made = Critic(
        critic_shapes.graph,
        critic_shapes.fixed,
        make_optimizer(config.optim),
        config,
        settings.train.objective,
    )
    return made, critic_shapes, config.optim


def _microbatch(objective: ObjectiveConfig, extras: Iterable[str], mesh: Mesh) -> Batch:
    """The largest one, as shapes on the mesh."""
    length = objective.lengths[-1]
    rows = objective.rows(length, data_shards(mesh))
    split = NamedSharding(mesh, PartitionSpec(ROW_AXES))

    def side(dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, length), dtype, sharding=split)

    beside = {name: side(jnp.float32) for name in extras}
    branches = side(jnp.int32) if objective.share_prefixes else None
    return Batch(side(jnp.int32), side(jnp.int32), side(jnp.int32), side(jnp.bool_), beside, branches)


def _accumulate(
    name: str, descent: Descent, params: PyTree, frozen: PyTree, batch: Batch, mesh: Mesh
) -> CompiledProgram:
    sums = {key: _whole((), jnp.float32, mesh) for key in descent.sums}
    return _compile(name, descent.accumulate, (params, frozen, params, sums, batch), mesh)


def _apply(name: str, descent: Descent, optim: OptimConfig, params: PyTree, mesh: Mesh) -> CompiledProgram:
    shapes = (params, optimizer_state(optim, params, mesh), params, _whole((), jnp.float32, mesh))
    return _compile(name, descent.apply, shapes, mesh)


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
        needed = re.search(r"(?:temporaries \(|Used )([\d.]+)([KMGT])", str(error))
        total = float(needed[1]) * 1024.0 ** (1 + "KMGT".index(needed[2])) if needed else float("inf")
        message = str(error).split("\n")[0]
        return CompiledProgram(
            name, time.perf_counter() - began, arguments, max(total - arguments, 0.0), refusal=message
        )
    # A TPU's peak is what the compiler holds against the chip's memory: arguments count, the program itself does not.
    memory, text = compiled.memory_analysis(), compiled.as_text()
    own = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    if mesh.devices.flat[0].platform == "tpu":
        own = memory.peak_memory_in_bytes - memory.argument_size_in_bytes
    return CompiledProgram(
        name,
        time.perf_counter() - began,
        memory.argument_size_in_bytes,
        own + memory.generated_code_size_in_bytes,
        float((compiled.cost_analysis() or {}).get("flops", 0.0)),
        {part: collectives(text, scope) for part, scope in (scopes or {name: ""}).items()},
    )


def _placed(state: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    places = shardings(state, mesh)
    flat = {
        path: leaf.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[path]))
        for path, leaf in nnx.to_flat_state(state)
    }
    return nnx.from_flat_state(flat)


def _whole(shape: tuple[int, ...], dtype: DTypeLike, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def _no_host(*report: Any) -> np.ndarray:
    raise RuntimeError("a planned rollout has no host")


Compiler = Callable[[Settings, ModelShapes, Mesh], CompiledProgram]
COMPILERS: tuple[Compiler, ...] = (rollout, accumulate, apply)
CRITIC_COMPILERS: tuple[Compiler, ...] = (critic_accumulate, critic_apply)
"""Those of PPO's critic."""
