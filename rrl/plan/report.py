"""Format a capacity plan as text. Read `report` first."""

from rrl.parallel.memory import memory_unit
from rrl.parallel.mesh import data_shards
from rrl.parallel.topology import GIB
from rrl.plan.capacity import CapacityPlan
from rrl.plan.suggestion import suggest_change

FLOPS_NOTE = (
    "XLA counts the body of a loop (layers, chunks, tokens) once; the times below count every iteration"
)
"""Note below XLA's FLOPs."""


def report(plan: CapacityPlan) -> str:
    """Return the text that `launch/plan.py` prints."""
    blocks = (_head(plan), _memory(plan), _programs(plan), _time(plan), _conclusion(plan))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _head(plan: CapacityPlan) -> list[str]:
    chip, mesh, rollout = plan.topology.chip, plan.mesh.shape, plan.settings.rollout
    objective = plan.settings.train.objective
    length = objective.row_lengths[-1]
    rows = objective.rows_per_microbatch(length, data_shards(plan.mesh))
    adapters = f", of which {plan.trained / 1e9:.3g} B are trained" if plan.trained < plan.parameters else ""
    slots = rollout.oversubscribed_slots
    oversubscribed = f" and {slots} oversubscribed slots" if slots else ""
    lines = [
        f"{plan.settings.name} on {plan.topology.name}: {plan.topology.size} x {chip.label}, "
        f"{chip.memory / GIB:.2f} GiB of memory each",
        f"policy    {plan.parameters / 1e9:.3g} B parameters{adapters} ({plan.config_source})",
        "mesh      " + ", ".join(f"{axis}={size}" for axis, size in mesh.items()),
        f"dtypes    {plan.compute_dtype} computation and reference, "
        f"{plan.settings.compute.param_dtype} trained parameters",
        f"kernels   remat={plan.remat}, attention={plan.attention}",
        f"rollout   {rollout.rows} rows{oversubscribed} of {rollout.context} tokens",
        f"update    microbatches of {rows} rows of {length} tokens",
    ]
    if rows * length > objective.microbatch_tokens:
        lines.append(
            f"          (objective.microbatch_tokens={objective.microbatch_tokens} is less than one row for each of the "
            f"{data_shards(plan.mesh)} data shards)"
        )
    reader = "reader and " if plan.settings.reader and "reader" not in plan.memory else ""
    return [*lines, f"excluded  {reader}query encoder"]


def _memory(plan: CapacityPlan) -> list[str]:
    unit, size = memory_unit(sum(plan.memory[plan.largest_phase].values()))
    how = "as compiled" if plan.programs else "AN ESTIMATE: counted, not compiled"
    phases = list(plan.memory)
    parts = list(dict.fromkeys(part for phase in phases for part in plan.memory[phase]))
    lines = [f"memory of each device, {unit} ({how}){'':4}" + "".join(f"{phase:>16}" for phase in phases)]
    width = len(lines[0]) - 16 * len(phases)
    for part in parts:
        cells = (plan.memory[phase].get(part) for phase in phases)
        row = "".join(f"{'-' if cell is None else f'{cell / size:.2f}':>16}" for cell in cells)
        lines.append(f"  {part:<{width - 2}}{row}")
    totals = "".join(f"{sum(plan.memory[phase].values()) / size:>16.2f}" for phase in phases)
    return [*lines, f"  {'total':<{width - 2}}{totals}"]


def _programs(plan: CapacityPlan) -> list[str]:
    lines = []
    for program in plan.programs:
        if program.refusal:
            lines.append(
                f"{program.name}: the compiler refused it after {program.compile_seconds:.0f} s: {program.refusal}"
            )
            continue
        lines.append(
            f"{program.name}: compiled in {program.compile_seconds:.0f} s, {program.flops:.3g} FLOPs per device as counted "
            "by XLA"
        )
        for part, kinds in program.traffic.items():
            results = (
                "; ".join(f"{t.count:.0f} {kind} {_bytes(t.bytes)}" for kind, t in kinds.items()) or "none"
            )
            lines.append(f"  collectives of one {part}, per device: {results}")
    return [*lines, f"  ({FLOPS_NOTE})"] if lines else []


def _time(plan: CapacityPlan) -> list[str]:
    chip, chips, work = plan.topology.chip, plan.topology.size, plan.workload
    train = plan.settings.train
    lines = [
        f"a step: {train.questions} questions x {train.samples} episodes of {work.tokens} tokens, of which the policy samples "
        f"{work.policy_tokens} (assumed; --tokens, --policy_tokens)"
    ]
    if not chip.flops:
        flops = sum(cost.flops for cost in plan.costs.values())
        return [*lines, f"  {flops:.3g} FLOPs; no roofline, since no speeds are published for {chip.label}"]
    total = 0.0
    for name, cost in plan.costs.items():
        seconds = cost.seconds(chip, chips)
        total += seconds
        # Traffic is known only from compiled programs.
        links = (
            f"{cost.collective_bytes / chip.interconnect:.1f} s"
            if plan.programs or chips == 1
            else "not counted"
        )
        lines.append(
            f"  {name:<16}{seconds:>8.1f} s at least: {cost.flops:.3g} FLOPs {cost.flops / chip.flops / chips:.1f} s, memory "
            f"{cost.memory_bytes / chip.bandwidth / chips:.1f} s, links {links}"
        )
    return [*lines, f"  {'total':<16}{total:>8.1f} s at least, at the chip's published speeds"]


def _conclusion(plan: CapacityPlan) -> list[str]:
    unit, size = memory_unit(sum(plan.memory[plan.largest_phase].values()))
    need = sum(plan.memory[plan.largest_phase].values()) / size
    available = plan.topology.chip.memory / size
    guess = "" if plan.programs else " (an estimate)"
    if plan.fits:
        return [
            f"IT FITS{guess}: the {plan.largest_phase} needs {need:.2f} of {available:.2f} {unit} on each device"
        ]
    totals = {
        phase: sum(parts.values()) / size
        for phase, parts in plan.memory.items()
        if phase != plan.largest_phase
    }
    others = "".join(f"; {phase}: {total:.2f}" for phase, total in totals.items() if total > available)
    return [
        f"IT DOES NOT FIT{guess}: the {plan.largest_phase} needs {need:.2f} of {available:.2f} {unit} on each device{others}",
        f"change first: {suggest_change(plan)}",
    ]


def _bytes(count: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 2.0**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1024:.1f} KiB"
