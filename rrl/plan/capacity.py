"""Will it fit? Memory, traffic and least time of a run on chips that nobody here owns.

The run's own programs are compiled for the topology (`rrl.plan.programs`); where that cannot be done, for GPUs, sizes are
counted instead, and the report says so.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from rrl.errors import UserError
from rrl.files import shipped
from rrl.models.attention_backends import AttentionBackend
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Remat
from rrl.models.hf import check_context, read_decoder_config
from rrl.parallel.mesh import data_shards
from rrl.parallel.topology import GIB, Topology, open_topology
from rrl.plan import programs
from rrl.plan.estimate import StepCost, Workload, cache_device_bytes, estimate_temporaries, step_costs
from rrl.plan.programs import CompiledProgram, ModelShapes, device_bytes
from rrl.train.experiment import TrainSettings

_QWEN = {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-3B": _QWEN
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 11008,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": _QWEN
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "tie_word_embeddings": False,
    },
}
"""The config.json fields of the models in the papers' runs, for who plans before downloading."""

STATE = ("parameters", "reference", "optimiser state", "critic", "critic's optimiser", "gradients")


@dataclasses.dataclass(frozen=True)
class CapacityPlan:
    """What `plan` found."""

    settings: TrainSettings
    topology: Topology
    mesh: Mesh | AbstractMesh
    config: DecoderConfig
    config_source: str
    """Where the policy's shape is from."""
    parameters: float
    trained: float
    """Of the parameters, those that the optimiser changes."""
    compute_dtype: str
    remat: Remat
    attention: AttentionBackend
    memory: dict[str, dict[str, float]]
    """Bytes of one device by phase (rollout, update, optimiser step, and the critic's two) and part."""
    programs: list[CompiledProgram]
    """What was compiled; empty where sizes are counted."""
    costs: dict[str, StepCost]
    workload: Workload

    @property
    def largest_phase(self) -> str:
        """The phase that needs the most memory."""
        return max(self.memory, key=lambda phase: sum(self.memory[phase].values()))

    @property
    def fits(self) -> bool:
        """Whether every phase has room on each device."""
        return sum(self.memory[self.largest_phase].values()) <= self.topology.chip.memory


def plan_capacity(
    config: Mapping[str, Any],
    topology: str,
    *,
    tokens: int = 0,
    policy_tokens: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> CapacityPlan:
    """Plans a config (of the form of configs/rsearch_grpo.py) on a topology such as v5e:4x4.

    The mesh is the config's, over all chips; where that is a single device, `default_mesh`.

    Args:
        tokens: of the mean trajectory, for the time of a step; 0: half the context.
        policy_tokens: of them those that the policy writes; 0: a quarter.

    Raises:
        UserError: no such topology, libtpu is missing, sizes that do not multiply to the chips, no shape for the policy.
    """
    settings = TrainSettings.parse(config)
    shape, source = policy_shape(settings.policy)
    check_context(shape, settings.rollout.context, f"policy={settings.policy!r}")
    slice_ = open_topology(topology)
    sizes = dataclasses.asdict(settings.mesh)
    if set(sizes.values()) == {1}:
        sizes = default_mesh(shape, slice_.size, settings.rollout.rows)
    try:
        devices = slice_.mesh(**sizes)
    except UserError as error:
        raise UserError(f"{error}; set --config.mesh.data, .fsdp and .tensor") from error
    shards = data_shards(devices)
    for name in ("rows", "oversubscribed_slots"):
        if (count := getattr(settings.rollout, name)) % shards:
            raise UserError(
                f"rollout.{name}={count} must be a multiple of data x fsdp = {shards} of the mesh; "
                f"give --config.rollout.{name}={-(-count // shards) * shards} or another config.mesh"
            )
    compute = settings.compute.for_platform(slice_.chip.platform)
    dtype, remat = jnp.dtype(compute.dtype), compute.remat
    attention = compute.backend(slice_.chip.platform, settings.train.objective.share_prefixes)
    model = ModelShapes.of(
        shape,
        settings,
        devices,
        dtype=dtype,
        param_dtype=jnp.dtype(settings.compute.param_dtype),
        remat=remat,
        attention=attention,
    )
    trained, fixed = (_count(state) for state in (model.params, model.fixed))
    state = {
        "parameters": device_bytes(model.params) + device_bytes(model.fixed),
        "reference": device_bytes(model.reference),
        "optimiser state": device_bytes(
            programs.optimizer_state(settings.train.optim, model.params, devices)
        ),
    }
    critic = model.critic
    if critic is not None and settings.train.critic is not None:
        optim = programs.optimizer_state(settings.train.critic.optim, critic.params, devices)
        state |= {
            "critic": device_bytes(critic.params) + device_bytes(critic.fixed),
            "critic's optimiser": device_bytes(optim),
        }
    compiled: list[CompiledProgram] = []
    if isinstance(devices, Mesh):
        for compiler in (*programs.COMPILERS, *(programs.CRITIC_COMPILERS if critic else ())):
            progress(f"compiling {compiler.__name__} for {topology} ...")
            compiled.append(compiler(settings, model, devices))
            last = compiled[-1]
            progress(
                f"{last.name}: {last.compile_seconds:.0f} s; the program and its arguments take "
                f"{(last.argument_bytes + last.temporary_bytes) / GIB:.2f} GiB of each device"
            )
        rest = {program.name: program.temporary_bytes for program in compiled}
    else:
        rest = estimate_temporaries(
            settings, shape, devices, remat=remat, parameters=trained + fixed, trained=trained
        )
        if critic is not None and settings.train.critic is not None:
            counts = [_count(part) for part in (critic.params, critic.fixed)]
            body = settings.train.critic.body(shape)
            own = estimate_temporaries(
                settings, body, devices, remat=remat, parameters=sum(counts), trained=counts[0]
            )
            rest |= {"critic update": own["update"], "critic step": own["optimiser step"]}
    itemsize = jnp.dtype(dtype).itemsize
    cache = cache_device_bytes(shape, settings.rollout.slots, settings.rollout.context, itemsize, devices)
    if compiled and not compiled[0].refusal:
        rest["rollout"] -= cache
    gradients = {"gradients": device_bytes(model.params)}
    memory = {
        "rollout": state | {"KV cache": cache, "activations": max(rest["rollout"], 0.0)},
        "update": state | gradients | {"activations": rest["update"]},
        "optimiser step": state | gradients | {"activations": rest["optimiser step"]},
    }
    if critic is not None:
        gradients = {"gradients": device_bytes(critic.params)}
        memory |= {
            phase: state | gradients | {"activations": rest[phase]}
            for phase in ("critic update", "critic step")
        }
    workload = Workload.of(settings, tokens, policy_tokens)
    traffic = {part: kinds for program in compiled for part, kinds in program.traffic.items()}
    return CapacityPlan(
        settings,
        slice_,
        devices,
        shape,
        source,
        trained + fixed,
        trained,
        jnp.dtype(dtype).name,
        remat,
        attention,
        memory,
        compiled,
        step_costs(settings, shape, devices, workload, remat=remat, trained=trained, traffic=traffic),
        workload,
    )


def policy_shape(folder: str) -> tuple[DecoderConfig, str]:
    """The shape of a policy's folder, or of a published model that the folder is named after."""
    if (shipped(folder) / "config.json").is_file():
        return read_decoder_config(folder), f"{folder}/config.json"
    for name, fields in PUBLISHED.items():
        if pathlib.Path(folder).name.startswith(name):
            return DecoderConfig.from_hf(fields), f"the published shape of {name}; no folder {folder} here"
    raise UserError(
        f"policy={folder!r} is no Hugging Face folder (no config.json there), nor named after a model whose shape is known "
        f"({', '.join(PUBLISHED)}); give one that is"
    )


def default_mesh(config: DecoderConfig, chips: int, rows: int) -> dict[str, int]:
    """tensor: the most chips that share the kv heads evenly, so that no cache is held twice; fsdp: all others, as far as the
    rows of the rollout go round; data: the rest."""
    tensor = math.gcd(config.kv_heads, chips)
    fsdp = math.gcd(chips // tensor, rows)
    return {"data": chips // tensor // fsdp, "fsdp": fsdp, "tensor": tensor}


def first_change(plan: CapacityPlan) -> str:
    """The setting to change first where it does not fit: the one behind the largest part that can give way; "" where it fits."""
    if plan.fits:
        return ""
    phase, room = plan.largest_phase, plan.topology.chip.memory
    parts = plan.memory[phase]
    excess = sum(parts.values()) - room
    objective, rows = plan.settings.train.objective, plan.settings.rollout.rows
    shards, mesh = data_shards(plan.mesh), plan.mesh.shape
    state = sum(parts.get(part, 0.0) for part in STATE)
    if state > room or state > 2 * (sum(parts.values()) - state):
        if mesh["data"] > 1:
            return (
                f"{_mesh_flags(1, mesh['data'] * mesh['fsdp'], mesh['tensor'])}: parameters and their state are held "
                f"{mesh['data']} times"
            )
        need = math.ceil(plan.topology.size * sum(parts.values()) / room)
        lora = "" if plan.settings.lora.rank else "--config.lora.rank=32 (adapters alone are trained), or "
        return f"{lora}more chips (about {need}): parameters and their state alone take {state / GIB:.1f} GiB of each"
    if phase == "rollout" and parts["KV cache"] >= parts["activations"]:
        spare = plan.settings.rollout.oversubscribed_slots
        why = "the KV cache is the largest part, and goes with the rows"
        fewer = int((rows + spare) * (1 - excess / parts["KV cache"])) // shards * shards
        if spare and fewer >= rows:
            return f"--config.rollout.oversubscribed_slots={fewer - rows} (now {spare}): {why}"
        if fewer >= shards:
            flags = f"--config.rollout.rows={fewer}" + " --config.rollout.oversubscribed_slots=0" * (
                spare > 0
            )
            return f"{flags} (now {rows}{f' and {spare}' if spare else ''}): {why}"
        return f"--config.rollout.context (now {plan.settings.rollout.context}): one row a shard is too much already"
    if phase == "rollout":
        fewer = max(plan.settings.rollout.prefill_tokens // 2, 1)
        return f"--config.rollout.prefill_tokens={fewer}: what prefilling holds is the largest part, and goes with it"
    length = objective.row_lengths[-1]
    each = objective.rows_per_microbatch(length, shards) // shards
    updates = phase.endswith("update")
    if updates and plan.remat != "full":
        return (
            f"--config.compute.remat=full (now {plan.remat}): what the backward pass keeps of each layer is the largest "
            "part"
        )
    if updates and each > 1:
        fewer = max(1, math.floor(each * (1 - excess / parts["activations"])))
        return (
            f"--config.objective.microbatch_tokens={fewer * shards * length} (now {objective.microbatch_tokens}): "
            f"{each} rows of {length} tokens a shard are in the backward pass at once"
        )
    if plan.config.heads % (2 * mesh["tensor"]) == 0 and mesh["fsdp"] % 2 == 0:
        return (
            f"{_mesh_flags(mesh['data'], mesh['fsdp'] // 2, 2 * mesh['tensor'])}: one row of {length} tokens a shard is "
            "too much; the tensor axis divides it"
        )
    return (
        f"--config.rollout.context and objective.row_lengths (now {plan.settings.rollout.context} and {length}): one row a shard "
        "is too much already"
    )


def _count(state: PyTree) -> float:
    return float(sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)))


def _mesh_flags(data: int, fsdp: int, tensor: int) -> str:
    return f"--config.mesh.data={data} --config.mesh.fsdp={fsdp} --config.mesh.tensor={tensor}"
