"""Compile the programs of a run from shapes alone, for devices that need not be available.

They are the programs that a run executes: the rollout's episode loop with its host callback; the gradient accumulation of one
microbatch (log-probabilities of policy and reference, loss, backward pass); the optimiser step; and with PPO the latter two for
the critic. Forward-only programs (the critic's values, the KL in the reward) need less memory and are not compiled.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import PyTree

from rrl.parallel.mesh import ROW_AXES, data_shards
from rrl.plan.hlo import Traffic, collectives
from rrl.rl.batch import Batch
from rrl.rl.critic import Critic
from rrl.rl.memory import device_bytes, optimizer_state
from rrl.rl.objective import ObjectiveConfig
from rrl.rl.optim import OptimConfig, make_optimizer
from rrl.rl.update import GradientAccumulator, Updater
from rrl.rollout.automaton import compile_stops
from rrl.rollout.backends import select_backend
from rrl.rollout.programs import DECODE_SCOPE, PREFILL_SCOPE, RolloutPrograms
from rrl.setup.settings import TrainSettings
from rrl.setup.shapes import CriticShapes, ModelShapes, replicated


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
    """Part -> kind of collective -> traffic of one execution. The rollout has the parts "decode" (one decode step) and "prefill"
    (one prefill of all rows). Every other program has one part, with the name of the program."""
    refusal: str = ""
    """The compiler's out-of-memory message if the program alone does not fit into a device's memory, else "".
    `argument_bytes` and `temporary_bytes` are then known, `flops` and `traffic` are not."""


def compile_rollout(settings: TrainSettings, model: ModelShapes, mesh: Mesh) -> CompiledProgram:
    """Compile the episode loop with its host callback, without a query encoder."""
    environment = settings.recipe.environment
    # Of the automaton that finds stop strings, only the number of states matters here. A vocabulary of one empty token is enough.
    automaton = compile_stops(environment.stops, [b""])
    programs = RolloutPrograms(
        model.graph,
        model.config,
        settings.rollout,
        mesh,
        select_backend(settings.rollout, model.config, mesh),
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
        replicated(key.shape, key.dtype, mesh),
        replicated(table, jnp.int32, mesh),  # (state, token id) -> next state
        replicated((), jnp.int32, mesh),  # index of the worker
    )
    return _compile("rollout", loop, shapes, mesh, scopes={"decode": DECODE_SCOPE, "prefill": PREFILL_SCOPE})


def compile_update(settings: TrainSettings, model: ModelShapes, mesh: Mesh) -> CompiledProgram:
    """Compile the gradient accumulation of the largest microbatch: log-probabilities under the policy (and
    under the reference, unless the KL is part of the reward), loss, backward pass."""
    accumulator = _updater(settings, model).accumulator
    batch = _microbatch(settings.train.objective, settings.train.objective.extra_names, mesh)
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
    sums = {key: replicated((), jnp.float32, mesh) for key in accumulator.sum_names}
    return _compile(name, accumulator.accumulate, (params, frozen, params, sums, batch), mesh)


def _compile_optimizer(
    name: str, accumulator: GradientAccumulator, optim: OptimConfig, params: PyTree, mesh: Mesh
) -> CompiledProgram:
    shapes = (params, optimizer_state(optim, params, mesh), params, replicated((), jnp.float32, mesh))
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


def compiled_temporaries(compiled: list[CompiledProgram], cache: float) -> dict[str, float]:
    """Return phase -> bytes beside the arguments, as compiled. `compiled` begins with the rollout.

    The rollout allocates the KV cache itself, so the compiler counts the cache among the temporaries, also if it refuses the
    program. The report shows the cache as a separate part, so it is subtracted here.
    """
    temporaries = {program.name: program.temporary_bytes for program in compiled}
    temporaries["rollout"] = max(temporaries["rollout"] - cache, 0.0)
    return temporaries


def _refuse_host_callback(*message: Any) -> np.ndarray:
    raise RuntimeError("this rollout is only compiled; it must not be executed")


Compiler = Callable[[TrainSettings, ModelShapes, Mesh], CompiledProgram]
COMPILERS: tuple[Compiler, ...] = (compile_rollout, compile_update, compile_optimizer_step)
"""They compile the programs of every run."""
CRITIC_COMPILERS: tuple[Compiler, ...] = (compile_critic_update, compile_critic_step)
"""They compile the programs of PPO's critic."""
