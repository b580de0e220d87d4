"""What a process holds, as tests bound it."""

import gc
from pathlib import Path


def memory_maps() -> int:
    """Memory maps of this process, some of them of each compiled program; 0 where there is no /proc."""
    file = Path("/proc/self/maps")
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def collect() -> None:
    """Collects all garbage: what jaxlib lets go of in one pass may free more in the next."""
    for _ in range(3):
        gc.collect()
