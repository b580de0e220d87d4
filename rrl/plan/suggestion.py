"""Suggest the setting to change first if a planned run does not fit. Read `suggest_change` first."""

import math

from rrl.parallel.mesh import data_shards
from rrl.parallel.topology import GIB
from rrl.plan.capacity import CapacityPlan

STATE = (
    *("parameters", "reference", "optimiser state", "critic", "critic's optimiser", "gradients"),
    *("average", "reader", "judge"),
)
"""Parts of memory that are model and optimiser state."""


def suggest_change(plan: CapacityPlan) -> str:
    """Return the setting to change first if the run does not fit; "" if it fits.

    It is the setting behind the largest part of memory that can be reduced.
    """
    if plan.fits:
        return ""
    available = plan.topology.chip.memory
    parts = plan.memory[plan.largest_phase]
    excess = sum(parts.values()) - available
    state = sum(parts.get(part, 0.0) for part in STATE)
    # The state alone does not fit, or it is more than two thirds of what the phase needs.
    if state > available or state > 2 * (sum(parts.values()) - state):
        return _reduce_state(plan, state)
    if plan.largest_phase != "rollout":
        return _reduce_update(plan, excess)
    if parts["KV cache"] >= parts["activations"]:
        return _reduce_cache(plan, excess)
    prefill_tokens = max(plan.settings.rollout.prefill_tokens // 2, 1)
    return (
        f"--config.rollout.prefill_tokens={prefill_tokens}: the prefill's activations are the largest part, and proportional "
        "to it"
    )


def _reduce_state(plan: CapacityPlan, state: float) -> str:
    """Return the change if parameters and their state, `state` bytes of each device, are too large."""
    mesh = plan.mesh.shape
    if mesh["data"] > 1:
        return (
            f"{_mesh_flags(1, mesh['data'] * mesh['fsdp'], mesh['tensor'])}: parameters and their state are stored "
            f"{mesh['data']} times"
        )
    total = sum(plan.memory[plan.largest_phase].values())
    chips = math.ceil(plan.topology.size * total / plan.topology.chip.memory)
    lora = "" if plan.settings.lora.rank else "--config.lora.rank=32 (trains adapters only), or "
    return f"{lora}more chips (about {chips}): parameters and their state alone need {state / GIB:.1f} GiB of each"


def _reduce_cache(plan: CapacityPlan, excess: float) -> str:
    """Return the change if the KV cache is the largest part of a rollout that exceeds the memory by `excess` bytes."""
    rollout, shards = plan.settings.rollout, data_shards(plan.mesh)
    rows, oversubscribed = rollout.rows, rollout.oversubscribed_slots
    why = "the KV cache is the largest part, and proportional to the rows"
    cache = plan.memory["rollout"]["KV cache"]
    fewer = int((rows + oversubscribed) * (1 - excess / cache)) // shards * shards
    if oversubscribed and fewer >= rows:
        return f"--config.rollout.oversubscribed_slots={fewer - rows} (now {oversubscribed}): {why}"
    if fewer >= shards:
        flags = f"--config.rollout.rows={fewer}" + " --config.rollout.oversubscribed_slots=0" * (
            oversubscribed > 0
        )
        return f"{flags} (now {rows}{f' and {oversubscribed}' if oversubscribed else ''}): {why}"
    return f"--config.rollout.context (now {rollout.context}): even one row per shard does not fit"


def _reduce_update(plan: CapacityPlan, excess: float) -> str:
    """Return the change if the activations of an update or an optimiser step exceed the memory by `excess` bytes."""
    objective, mesh, shards = plan.settings.train.objective, plan.mesh.shape, data_shards(plan.mesh)
    length = objective.row_lengths[-1]
    rows_per_shard = objective.rows_per_microbatch(length, shards) // shards
    is_update = plan.largest_phase.endswith("update")
    if is_update and plan.remat != "full":
        return (
            f"--config.compute.remat=full (now {plan.remat}): the activations that the backward pass keeps are the "
            "largest part"
        )
    if is_update and rows_per_shard > 1:
        activations = plan.memory[plan.largest_phase]["activations"]
        fewer = max(1, math.floor(rows_per_shard * (1 - excess / activations)))
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


def _mesh_flags(data: int, fsdp: int, tensor: int) -> str:
    return f"--config.mesh.data={data} --config.mesh.fsdp={fsdp} --config.mesh.tensor={tensor}"
