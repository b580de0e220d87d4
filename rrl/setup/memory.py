"""Memory of a run on one device, counted without compiling or loading anything: the parts of each phase.

A run refuses to start if it needs more than there is (`require_run_memory`), and `launch/plan.py` shows the same numbers. Read
`run_memory` first.
"""

from collections.abc import Mapping

import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from rrl.files import shipped
from rrl.models.config import DecoderConfig
from rrl.models.weights import CONFIG_FILE
from rrl.parallel.memory import device_memory, require_memory
from rrl.parallel.mesh import data_shards
from rrl.rl.memory import cast_values, device_bytes, optimizer_state, update_temporaries
from rrl.rollout.config import EngineConfig
from rrl.rollout.memory import engine_memory, folder_memory, is_cpu
from rrl.setup.settings import TrainSettings
from rrl.setup.shapes import ModelShapes

SMALLER_RUN = (
    "use a smaller model, --config.lora.rank=32 (trains adapters only), --config.compute.remat=full (recomputes activations), or "
    "a smaller --config.rollout.rows, --config.rollout.context or --config.objective.microbatch_tokens; on a CPU, "
    "--config.rollout.weights=unpacked saves a copy of the weights. python launch/plan.py "
    "--topology=cpu:1 with the same --config shows each phase and what to change first"
)
"""How to make a run smaller, for an error message."""

INFERENCE_PHASES = ("rollout", "reader", "judge")
"""Phases of a run without updates."""


def require_run_memory(settings: TrainSettings, policy: DecoderConfig, mesh: Mesh) -> None:
    """Raise UserError, with the numbers, if a phase of the run needs more memory than a device has.

    Args:
      settings: the run, with the dtypes of this platform (`ComputeConfig.for_platform`).
      policy: architecture of the policy.
      mesh: devices of the run.
    """
    device = mesh.devices.flat[0]
    attention = settings.compute.backend(device.platform, settings.train.objective.share_prefixes)
    model = ModelShapes.of(policy, settings, mesh, settings.compute, attention)
    phases = run_memory(settings, model, mesh)
    if not settings.train.steps:
        phases = {phase: phases[phase] for phase in phases if phase in INFERENCE_PHASES}
    if not is_cpu(mesh):
        # The estimate of activations was compared with compiled programs on CPUs only. Here XLA says whether they fit.
        phases = {
            phase: {part: size for part, size in parts.items() if part != "activations"}
            for phase, parts in phases.items()
        }
    phase = largest_phase(phases)
    what = f"policy={settings.policy!r}: the {phase} of this run"
    require_memory(phases[phase], device_memory(mesh), what, SMALLER_RUN)


def largest_phase(phases: Mapping[str, Mapping[str, float]]) -> str:
    """Return the phase that needs the most memory."""
    return max(phases, key=lambda phase: sum(phases[phase].values()))


def run_memory(
    settings: TrainSettings,
    model: ModelShapes,
    mesh: Mesh | AbstractMesh,
    temporaries: Mapping[str, float] | None = None,
) -> dict[str, dict[str, float]]:
    """Return phase -> part -> bytes on one device.

    The phases are rollout, update and optimiser step; critic update and critic step if there is a critic; reader and judge if
    there is such a model and its folder exists.

    Args:
      settings: the run.
      model: policy, reference and critic.
      mesh: devices, which may be abstract.
      temporaries: phase -> bytes that its program needs beside its arguments and the KV cache, as compiled; None: estimated.
    """
    params = (model.params, model.fixed)
    engine = engine_memory(
        model.config,
        settings.rollout,
        mesh,
        model.dtype,
        cast=cast_values(params, model.dtype),
        lora=settings.lora.rank > 0,
    )
    if temporaries is None:
        temporaries = _estimated_temporaries(settings, model, mesh)
    else:
        engine["activations"] = max(temporaries["rollout"], 0.0)
    frozen = _frozen_models(settings, mesh, model.dtype)
    state = _state_memory(settings, model, mesh)
    state |= {name: memory.pop("parameters") for name, memory in frozen.items()}
    training = state | {"gradients": device_bytes(model.params)}
    memory = {
        "rollout": state | engine,
        "update": training | {"activations": temporaries["update"]},
        "optimiser step": training | {"activations": temporaries["optimiser step"]},
    }
    if model.critic is not None:
        training = state | {"gradients": device_bytes(model.critic.params)}
        for phase in ("critic update", "critic step"):
            memory[phase] = training | {"activations": temporaries[phase]}
    return memory | {name: state | parts for name, parts in frozen.items()}


def _frozen_models(
    settings: TrainSettings, mesh: Mesh | AbstractMesh, dtype: np.dtype
) -> dict[str, dict[str, float]]:
    """Return name -> memory of the reader and of a judge that is a model, of those whose folders exist."""
    models: dict[str, tuple[str, EngineConfig]] = {}
    if settings.reader:
        models["reader"] = settings.reader, settings.reader_rollout
    judge = settings.judge if settings.recipe.needs_judge else None
    if judge is not None and judge.judge.kind == "model":
        models["judge"] = judge.judge.folder, judge.rollout
    return {
        name: folder_memory(folder, engine, mesh, dtype)
        for name, (folder, engine) in models.items()
        if (shipped(folder) / CONFIG_FILE).is_file()
    }


def _state_memory(settings: TrainSettings, model: ModelShapes, mesh: Mesh | AbstractMesh) -> dict[str, float]:
    """Return part -> bytes of the models and the optimisers' states, which every phase needs."""
    state = {
        "parameters": device_bytes(model.params) + device_bytes(model.fixed),
        "reference": device_bytes(model.reference),
        "optimiser state": device_bytes(optimizer_state(settings.train.optim, model.params, mesh)),
    }
    if settings.train.average_last:
        state["average"] = device_bytes(model.params)
    critic = model.critic
    if critic is not None and settings.train.critic is not None:
        optim = optimizer_state(settings.train.critic.optim, critic.params, mesh)
        state |= {
            "critic": device_bytes(critic.params) + device_bytes(critic.fixed),
            "critic's optimiser": device_bytes(optim),
        }
    return state


def _estimated_temporaries(
    settings: TrainSettings, model: ModelShapes, mesh: Mesh | AbstractMesh
) -> dict[str, float]:
    """Return phase -> estimated bytes beside the arguments on one device, of the updates of policy and critic."""
    objective, shards = settings.train.objective, data_shards(mesh)
    length = objective.row_lengths[-1]
    rows = objective.rows_per_microbatch(length, shards) / shards

    def update(config: DecoderConfig, states: tuple[PyTree, PyTree]) -> float:
        return update_temporaries(
            config, mesh, states, model.dtype, model.compute.remat, rows=rows, length=length
        )

    temporaries = {
        "update": update(model.config, (model.params, model.fixed)),
        "optimiser step": device_bytes(model.params),
    }
    critic = model.critic
    if critic is not None and settings.train.critic is not None:
        body = settings.train.critic.decoder_config(model.config)
        temporaries |= {
            "critic update": update(body, (critic.params, critic.fixed)),
            "critic step": device_bytes(critic.params),
        }
    return temporaries
