"""Predicts whether a run fits: memory, communication and minimum time on accelerators that need not be
available. Read `plan_capacity` first.

The run's own programs are compiled for the topology (`rrl.plan.programs`). For GPUs that is not
possible; sizes are then counted (`rrl.plan.estimate`), and the report marks them as estimates.
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
from rrl.train.settings import TrainSettings

_GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
}
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
    "gemma-3-1b": _GEMMA3
    | {
        "vocab_size": 262144,
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
    },
    "gemma-3-4b": _GEMMA3
    | {
        "vocab_size": 262208,
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 10240,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}
"""Model name -> fields of its config.json, for the models of the papers' runs and Gemma 3. A run can thus be planned
before the model is downloaded."""

STATE = ("parameters", "reference", "optimiser state", "critic", "critic's optimiser", "gradients")
"""Parts of memory that are model and optimiser state."""


@dataclasses.dataclass(frozen=True)
class CapacityPlan:
    """Result of `plan_capacity`."""

    settings: TrainSettings
    topology: Topology
    mesh: Mesh | AbstractMesh
    config: DecoderConfig
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
        return max(self.memory, key=lambda phase: sum(self.memory[phase].values()))

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

    The mesh is that of the config. If the config asks for a single device, the mesh is `default_mesh` over all chips.

    Args:
      config: of the form of configs/rsearch_grpo.py.
      topology: name of a topology, such as v5e:4x4.
      tokens: tokens of the mean trajectory, for the time of a step; 0: half the context.
      policy_tokens: tokens of it that the policy samples; 0: a quarter.
      progress: receives one line per compiled program.

    Raises:
      UserError: an unknown topology, libtpu is missing, mesh sizes whose product is not the number of
        chips, or no shape for the policy.
    """
    settings = TrainSettings.parse(config)
    decoder_config, source = policy_shape(settings.policy)
    check_context(decoder_config, settings.rollout.context, f"policy={settings.policy!r}")
    opened = open_topology(topology)
    sizes = dataclasses.asdict(settings.mesh)
    if set(sizes.values()) == {1}:
        sizes = default_mesh(decoder_config, opened.size, settings.rollout.rows)
    try:
        mesh = opened.mesh(**sizes)
    except UserError as error:
        raise UserError(f"{error}; set --config.mesh.data, .fsdp and .tensor") from error
    shards = data_shards(mesh)
    for name in ("rows", "oversubscribed_slots"):
        if (count := getattr(settings.rollout, name)) % shards:
            raise UserError(
                f"rollout.{name}={count} must be a multiple of data x fsdp = {shards} of the mesh; "
                f"give --config.rollout.{name}={-(-count // shards) * shards} or another config.mesh"
            )
    compute = settings.compute.for_platform(opened.chip.platform)
    dtype, remat = jnp.dtype(compute.dtype), compute.remat
    attention = compute.backend(opened.chip.platform, settings.train.objective.share_prefixes)
    model = ModelShapes.of(
        decoder_config,
        settings,
        mesh,
        dtype=dtype,
        param_dtype=jnp.dtype(settings.compute.param_dtype),
        remat=remat,
        attention=attention,
    )
    trained, fixed = (_count(state) for state in (model.params, model.fixed))
    state = {
        "parameters": device_bytes(model.params) + device_bytes(model.fixed),
        "reference": device_bytes(model.reference),
        "optimiser state": device_bytes(programs.optimizer_state(settings.train.optim, model.params, mesh)),
    }
    critic = model.critic
    if critic is not None and settings.train.critic is not None:
        optim = programs.optimizer_state(settings.train.critic.optim, critic.params, mesh)
        state |= {
            "critic": device_bytes(critic.params) + device_bytes(critic.fixed),
            "critic's optimiser": device_bytes(optim),
        }
    compiled: list[CompiledProgram] = []
    if isinstance(mesh, Mesh):  # an abstract mesh (GPUs) has no devices to compile for
        for compiler in (*programs.COMPILERS, *(programs.CRITIC_COMPILERS if critic else ())):
            progress(f"compiling {compiler.__name__.removeprefix('compile_')} for {topology} ...")
            compiled.append(compiler(settings, model, mesh))
            last = compiled[-1]
            progress(
                f"{last.name}: {last.compile_seconds:.0f} s; the program and its arguments take "
                f"{(last.argument_bytes + last.temporary_bytes) / GIB:.2f} GiB of each device"
            )
        temporary = {program.name: program.temporary_bytes for program in compiled}
    else:
        temporary = estimate_temporaries(
            settings, decoder_config, mesh, remat=remat, parameters=trained + fixed, trained=trained
        )
        if critic is not None and settings.train.critic is not None:
            counts = [_count(part) for part in (critic.params, critic.fixed)]
            body = settings.train.critic.decoder_config(decoder_config)
            critic_bytes = estimate_temporaries(
                settings, body, mesh, remat=remat, parameters=sum(counts), trained=counts[0]
            )
            temporary |= {
                "critic update": critic_bytes["update"],
                "critic step": critic_bytes["optimiser step"],
            }
    itemsize = jnp.dtype(dtype).itemsize
    cache = cache_device_bytes(
        decoder_config, settings.rollout.slots, settings.rollout.context, itemsize, mesh
    )
    # The temporaries of a compiled rollout include the KV cache, which is reported as a part of its own.
    if compiled and not compiled[0].refusal:
        temporary["rollout"] -= cache
    gradients = {"gradients": device_bytes(model.params)}
    memory = {
        "rollout": state | {"KV cache": cache, "activations": max(temporary["rollout"], 0.0)},
        "update": state | gradients | {"activations": temporary["update"]},
        "optimiser step": state | gradients | {"activations": temporary["optimiser step"]},
    }
    if critic is not None:
        gradients = {"gradients": device_bytes(critic.params)}
        memory |= {
            phase: state | gradients | {"activations": temporary[phase]}
            for phase in ("critic update", "critic step")
        }
    workload = Workload.of(settings, tokens, policy_tokens)
    traffic = {part: kinds for program in compiled for part, kinds in program.traffic.items()}
    return CapacityPlan(
        settings,
        opened,
        mesh,
        decoder_config,
        source,
        trained + fixed,
        trained,
        jnp.dtype(dtype).name,
        remat,
        attention,
        memory,
        compiled,
        step_costs(settings, decoder_config, mesh, workload, remat=remat, trained=trained, traffic=traffic),
        workload,
    )


def policy_shape(folder: str) -> tuple[DecoderConfig, str]:
    """Return the shape of a policy and its source: the config.json of its folder, or the published model
    of that name."""
    if (shipped(folder) / "config.json").is_file():
        return read_decoder_config(folder), f"{folder}/config.json"
    for name, fields in PUBLISHED.items():
        if pathlib.Path(folder).name.startswith(name):
            return DecoderConfig.from_hf(
                fields
            ), f"the published shape of {name}; the folder {folder} does not exist"
    raise UserError(
        f"policy={folder!r} is not a Hugging Face folder (no config.json), and its name is not that of a "
        f"model with a known shape ({', '.join(PUBLISHED)}); give another policy"
    )


def default_mesh(config: DecoderConfig, chips: int, rows: int) -> dict[str, int]:
    """Return the sizes of a mesh.

    tensor: the largest number of chips that divides the kv heads evenly, so that no part of the KV
    cache is duplicated. fsdp: as many of the other chips as divide the rows of the rollout. data: the
    rest.
    """
    tensor = math.gcd(config.kv_heads, chips)
    fsdp = math.gcd(chips // tensor, rows)
    return {"data": chips // tensor // fsdp, "fsdp": fsdp, "tensor": tensor}


def first_change(plan: CapacityPlan) -> str:
    """Return the setting to change first if the run does not fit; "" if it fits.

    It is the setting behind the largest part of memory that can be reduced.
    """
    if plan.fits:
        return ""
    phase, room = plan.largest_phase, plan.topology.chip.memory
    parts = plan.memory[phase]
    excess = sum(parts.values()) - room
    objective, rows = plan.settings.train.objective, plan.settings.rollout.rows
    shards, mesh = data_shards(plan.mesh), plan.mesh.shape
    state = sum(parts.get(part, 0.0) for part in STATE)
    # The state alone does not fit, or it takes more than two thirds of the memory.
    if state > room or state > 2 * (sum(parts.values()) - state):
        if mesh["data"] > 1:
            return (
                f"{_mesh_flags(1, mesh['data'] * mesh['fsdp'], mesh['tensor'])}: parameters and their state are stored "
                f"{mesh['data']} times"
            )
        need = math.ceil(plan.topology.size * sum(parts.values()) / room)
        lora = "" if plan.settings.lora.rank else "--config.lora.rank=32 (trains adapters only), or "
        return f"{lora}more chips (about {need}): parameters and their state alone need {state / GIB:.1f} GiB of each"
    if phase == "rollout" and parts["KV cache"] >= parts["activations"]:
        oversubscribed = plan.settings.rollout.oversubscribed_slots
        why = "the KV cache is the largest part, and proportional to the rows"
        fewer = int((rows + oversubscribed) * (1 - excess / parts["KV cache"])) // shards * shards
        if oversubscribed and fewer >= rows:
            return f"--config.rollout.oversubscribed_slots={fewer - rows} (now {oversubscribed}): {why}"
        if fewer >= shards:
            flags = f"--config.rollout.rows={fewer}" + " --config.rollout.oversubscribed_slots=0" * (
                oversubscribed > 0
            )
            return f"{flags} (now {rows}{f' and {oversubscribed}' if oversubscribed else ''}): {why}"
        return f"--config.rollout.context (now {plan.settings.rollout.context}): even one row per shard does not fit"
    if phase == "rollout":
        fewer = max(plan.settings.rollout.prefill_tokens // 2, 1)
        return f"--config.rollout.prefill_tokens={fewer}: the prefill's activations are the largest part, and proportional to it"
    length = objective.row_lengths[-1]
    rows_per_shard = objective.rows_per_microbatch(length, shards) // shards
    updates = phase.endswith("update")
    if updates and plan.remat != "full":
        return (
            f"--config.compute.remat=full (now {plan.remat}): the activations that the backward pass keeps are the "
            "largest part"
        )
    if updates and rows_per_shard > 1:
        fewer = max(1, math.floor(rows_per_shard * (1 - excess / parts["activations"])))
        return (
            f"--config.objective.microbatch_tokens={fewer * shards * length} (now {objective.microbatch_tokens}): "
            f"each shard computes {rows_per_shard} rows of {length} tokens at once"
        )
    if plan.config.heads % (2 * mesh["tensor"]) == 0 and mesh["fsdp"] % 2 == 0:
        return (
            f"{_mesh_flags(mesh['data'], mesh['fsdp'] // 2, 2 * mesh['tensor'])}: even one row of {length} tokens per "
            "shard does not fit; the tensor axis splits it"
        )
    return (
        f"--config.rollout.context and objective.row_lengths (now {plan.settings.rollout.context} and {length}): even one row "
        "per shard does not fit"
    )


def _count(state: PyTree) -> float:
    return float(sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)))


def _mesh_flags(data: int, fsdp: int, tensor: int) -> str:
    return f"--config.mesh.data={data} --config.mesh.fsdp={fsdp} --config.mesh.tensor={tensor}"
