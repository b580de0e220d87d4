"""The memory of this machine's devices, and a check that a program's arrays fit into it. Read `require_memory` first."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
from jax.sharding import Mesh

from rrl.errors import UserError

GIB = 2.0**30
CGROUP_LIST = Path("/proc/self/cgroup")
"""File in which Linux lists the control groups of a process: a line ID:CONTROLLERS:PATH for each."""
CGROUP_ROOT = Path("/sys/fs/cgroup")
"""Folder of the control groups. Containers, Slurm and systemd limit memory by them."""


def host_memory() -> float:
    """Bytes of memory that this process may use: the machine's, or the smallest limit of its control groups."""
    physical = float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_cgroup_limits()])


def _cgroup_limits() -> Iterator[float]:
    """The limits of the process's control groups and of all groups above them, in both versions of control groups."""
    try:
        lines = CGROUP_LIST.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (
            (CGROUP_ROOT / "memory", "memory.limit_in_bytes") if controllers else (CGROUP_ROOT, "memory.max")
        )
        group = Path(path.lstrip("/"))
        # In a container, `root` may already be the process's group. Then `path` may name a folder that is not visible here.
        for folder in (group, *group.parents):
            try:
                limit = (root / folder / name).read_text().strip()
            except OSError:
                continue
            if limit.isdigit():  # "max": no limit
                yield float(limit)


def device_memory(mesh: Mesh | None) -> float:
    """Bytes of memory of a device of a mesh; infinite if unknown. None: the default device.

    The CPU devices of a mesh share the memory of the host.
    """
    devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    if devices[0].platform == "cpu":
        return host_memory() / len(devices)
    return float((devices[0].memory_stats() or {}).get("bytes_limit", math.inf))


def require_memory(needs: Mapping[str, float], available: float, what: str, fix: str) -> None:
    """Raises UserError if the parts of `needs` (name -> bytes on one device) together exceed `available` bytes.

    Args:
        needs: what must be in memory at the same time.
        available: memory of the device.
        what: what needs it, for the message.
        fix: what to change.
    """
    if (total := sum(needs.values())) > available:
        unit, size = memory_unit(total)
        parts = [f"{name} {need / size:.2f}" for name, need in needs.items() if need >= size / 200]
        raise UserError(
            f"{what} needs {total / size:.2f} {unit} of memory, but {available / size:.2f} {unit} are available: "
            f"{', '.join(parts)} {unit}; {fix}"
        )


def memory_unit(size: float) -> tuple[str, float]:
    """The unit in which a size is shown, GiB, MiB or KiB, and its bytes."""
    if size >= GIB / 4:
        return "GiB", GIB
    return ("MiB", 2.0**20) if size >= 2.0**20 / 4 else ("KiB", 2.0**10)
