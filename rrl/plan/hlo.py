"""Read the communication between devices from the text of a compiled program."""

import collections
import dataclasses
import math
import re

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "u64": 8, "f64": 8}
# The comment before each pattern says what its capture groups match.
# Name of a computation, from its first line.
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
# Result shapes, kind, and "-start" if it is asynchronous.
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(")
# Name of a computation that an instruction calls.
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
# Names of several such computations, separated by commas.
_LISTED = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_CHANNEL = re.compile(r"channel_id=\d+")
# Names of the condition and the body of a loop.
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
# Number of iterations of a loop, as annotated by XLA.
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind, on one device."""

    count: float
    """Number of executions; a collective inside a loop of known length counts once per iteration."""
    bytes: float
    """Size of the results, summed over all executions."""


def collectives(text: str, scope: str = "") -> dict[str, Traffic]:
    """Return the collectives of a program by kind.

    A loop of fixed length (layers, chunks) counts with its length. A loop whose length depends on data
    (decoding) counts once.

    Args:
      text: optimised HLO.
      scope: a `jax.named_scope`; if given, only collectives inside it count.
    """
    bodies: dict[str, list[str]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head[1]
            bodies[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name:
            bodies[name].append(line)
    executions: collections.Counter[str] = collections.Counter()

    def visit(name: str, factor: int) -> None:
        executions[name] += factor
        for line in bodies.get(name, ()):
            loop = _WHILE.search(line)
            iterations = _iterations(line, bodies.get(loop[1], [])) if loop else 1
            called = _CALLED.findall(line) + [
                part.strip().lstrip("%") for group in _LISTED.findall(line) for part in group.split(",")
            ]
            for inner in called:
                visit(inner, factor * iterations)

    visit(entry, 1)
    # The TPU compiler may split a collective into several instructions with the same channel_id. It counts once.
    by_channel: dict[str, tuple[str, int, int]] = {}
    for name, factor in executions.items():
        for position, line in enumerate(bodies.get(name, ())):
            if (match := _COLLECTIVE.search(line)) and scope in line:
                shapes = [_size(*shape) for shape in re.findall(r"(\w+)\[([\d,]*)\]", match[1])]
                # The shape of an asynchronous start lists operand and result. The result is the larger of the two (for
                # reduce-scatter the smaller).
                pick = min if match[2] == "reduce-scatter" else max
                size = pick(shapes) if match[3] else sum(shapes)
                channel = _CHANNEL.search(line)
                by_channel.setdefault(
                    channel[0] if channel else f"{name} {position}", (match[2], factor, factor * size)
                )
    parts = {kind: [part for part in by_channel.values() if part[0] == kind] for kind in COLLECTIVES}
    return {
        kind: Traffic(sum(count for _, count, _ in group), sum(size for *_, size in group))
        for kind, group in parts.items()
        if group
    }


def _iterations(line: str, condition: list[str]) -> int:
    """Return the number of iterations of a while loop; 1 if it is unknown.

    It is the number that XLA annotated, else the limit n of a short condition `i < n` with a single constant.
    """
    if known := _TRIPS.search(line):
        return int(known[1])
    limits = [int(n) for text in condition for n in re.findall(r"= s32\[\]\S* constant\((\d+)\)", text)]
    less_than = any("direction=LT" in text for text in condition)
    return limits[0] if len(limits) == 1 and less_than and len(condition) <= 6 else 1


def _size(dtype: str, shape: str) -> int:
    return _BYTES.get(dtype, 4) * math.prod(int(n) for n in shape.split(",") if n)
