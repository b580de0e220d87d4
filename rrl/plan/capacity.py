"""Predict whether a run fits: memory, communication and minimum time on accelerators that need not be available.

The run's own programs are compiled for the topology (`rrl.plan.programs`). For GPUs that is not possible, and for a single CPU
the run itself does not: sizes are then counted (`rrl.setup.memory`), and the report marks them as estimates. Read
`plan_capacity` first.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from rrl.errors import UserError
from rrl.models.attention_backends import AttentionBackend
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Remat
from rrl.models.hf import check_context
from rrl.parallel.mesh import data_shards
from rrl.parallel.topology import GIB, Topology, open_topology
from rrl.plan import programs
from rrl.plan.costs import StepCost, Workload, step_costs
from rrl.plan.policy_shape import policy_shape
from rrl.plan.programs import CompiledProgram, compiled_temporaries
from rrl.rl.memory import parameter_count
from rrl.rollout.memory import cache_device_bytes, is_cpu
from rrl.setup.memory import largest_phase, run_memory
from rrl.setup.settings import TrainSettings
from rrl.setup.shapes import ModelShapes


@dataclasses.dataclass(frozen=True)
class CapacityPlan:
    """Result of `plan_capacity`."""

    settings: TrainSettings
    topology: Topology
    mesh: Mesh | AbstractMesh
    config: DecoderConfig
    """Architecture of the policy."""
    config_source: str
    """Where `config` comes from: a config.json or a published model."""
    parameters: float
    """Number of parameters of the policy."""
    trained: float
    """Number of parameters that the optimiser changes."""
    compute_dtype: str
    remat: Remat
    attention: AttentionBackend
    memory: dict[str, dict[str, float]]
    """Phase (rollout, update, optimiser step, and with PPO critic update and critic step) -> part -> bytes on one device."""
    programs: list[CompiledProgram]
    """The compiled programs; empty if sizes are estimates."""
    costs: dict[str, StepCost]
    """Part of a training step -> cost."""
    workload: Workload

    @property
    def largest_phase(self) -> str:
        """The phase that needs the most memory."""
        return largest_phase(self.memory)

    @property
    def fits(self) -> bool:
        """Whether every phase fits into the memory of each device."""
        return sum(self.memory[self.largest_phase].values()) <= self.topology.chip.memory


def plan_capacity(
    config: Mapping[str, Any],
    topology: str,
    *,
    tokens: int = 0,
    policy_tokens: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> CapacityPlan:
    """Plan a run on a topology.

    Args:
      config: of the form of configs/rsearch_grpo.py.
      topology: name of a topology, such as v5e:4x4.
      tokens: number of tokens of the mean trajectory, for the time of a step; 0: half the context.
      policy_tokens: how many of these the policy samples; 0: a quarter of them.
      progress: receives one line per compiled program.

    Raises:
      UserError: an unknown topology, libtpu is missing, mesh sizes whose product is not the number of chips, or a policy of
        unknown architecture.
    """
    settings = TrainSettings.parse(config)
    policy, source = policy_shape(settings.policy)
    check_context(policy, settings.rollout.context, f"policy={settings.policy!r}")
    chips = open_topology(topology)
    mesh = plan_mesh(settings, policy, chips)
    compute = settings.compute.for_platform(chips.chip.platform)
    attention = compute.backend(chips.chip.platform, settings.train.objective.share_prefixes)
    model = ModelShapes.of(policy, settings, mesh, compute, attention)
    dtype, rollout = jnp.dtype(compute.dtype), settings.rollout
    cache = cache_device_bytes(policy, rollout.slots, rollout.context, dtype.itemsize, mesh)
    compiled: list[CompiledProgram] = []
    temporaries = None
    # An abstract mesh (GPUs) has no devices to compile for. On a single CPU the run counts its memory before it loads anything
    # (`rrl.setup.memory.require_run_memory`), so the plan counts it in the same way.
    if isinstance(mesh, Mesh) and not (is_cpu(mesh) and mesh.size == 1):
        compiled = _compile_programs(settings, model, mesh, topology, progress)
        temporaries = compiled_temporaries(compiled, cache)
    workload = Workload.of(settings, tokens, policy_tokens)
    trained = parameter_count(model.params)
    traffic = {part: kinds for program in compiled for part, kinds in program.traffic.items()}
    return CapacityPlan(
        settings=settings,
        topology=chips,
        mesh=mesh,
        config=policy,
        config_source=source,
        parameters=trained + parameter_count(model.fixed),
        trained=trained,
        compute_dtype=dtype.name,
        remat=compute.remat,
        attention=attention,
        memory=run_memory(settings, model, mesh, temporaries),
        programs=compiled,
        costs=step_costs(
            settings, policy, mesh, workload, remat=compute.remat, trained=trained, traffic=traffic
        ),
        workload=workload,
    )


def plan_mesh(settings: TrainSettings, policy: DecoderConfig, chips: Topology) -> Mesh | AbstractMesh:
    """Return the mesh of the config. If the config asks for a single device, it is `default_mesh` over all chips.

    Raises UserError if the mesh does not fit the chips, or if the rows of the rollout cannot be split over it.
    """
    sizes = dataclasses.asdict(settings.mesh)
    if set(sizes.values()) == {1}:
        sizes = default_mesh(policy, chips.size, settings.rollout.rows)
    try:
        mesh = chips.mesh(**sizes)
    except UserError as error:
        raise UserError(f"{error}; set --config.mesh.data, .fsdp and .tensor") from error
    shards = data_shards(mesh)
    for name in ("rows", "oversubscribed_slots"):
        if (count := getattr(settings.rollout, name)) % shards:
            raise UserError(
                f"rollout.{name}={count} must be a multiple of data x fsdp = {shards} of the mesh; "
                f"give --config.rollout.{name}={-(-count // shards) * shards} or another config.mesh"
            )
    return mesh


def default_mesh(config: DecoderConfig, chips: int, rows: int) -> dict[str, int]:
    """Return the sizes of a mesh.

    - tensor: the greatest common divisor of `chips` and the number of kv heads, so that no part of the KV cache is duplicated.
    - fsdp: the greatest common divisor of chips / tensor and the number of rows of the rollout.
    - data: the rest.
    """
    tensor = math.gcd(config.kv_heads, chips)
    fsdp = math.gcd(chips // tensor, rows)
    return {"data": chips // tensor // fsdp, "fsdp": fsdp, "tensor": tensor}


def _compile_programs(
    settings: TrainSettings, model: ModelShapes, mesh: Mesh, topology: str, progress: Callable[[str], None]
) -> list[CompiledProgram]:
    """Compile the programs of the run, the rollout first, and report each to `progress`."""
    compiled = []
    for compiler in (*programs.COMPILERS, *(programs.CRITIC_COMPILERS if model.critic else ())):
        progress(f"compiling {compiler.__name__.removeprefix('compile_')} for {topology} ...")
        program = compiler(settings, model, mesh)
        compiled.append(program)
        progress(
            f"{program.name}: {program.compile_seconds:.0f} s; the program and its arguments take "
            f"{(program.argument_bytes + program.temporary_bytes) / GIB:.2f} GiB of each device"
        )
    return compiled
