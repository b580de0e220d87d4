"""What a process holds, as tests bound it."""

import gc
from pathlib import Path

from rrl.parallel import memory


def memory_maps() -> int:
    """Memory maps of this process, some of them of each compiled program; 0 where there is no /proc."""
    file = Path("/proc/self/maps")
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def collect() -> None:
    """Collects all garbage: what jaxlib lets go of in one pass may free more in the next."""
    for _ in range(3):
        gc.collect()


def limit_memory(monkeypatch, folder: Path, size: int) -> None:
    """Makes `host_memory` see a control group that limits this process to `size` bytes; `folder` gets its files."""
    (folder / "groups").mkdir()
    (folder / "groups" / "memory.max").write_text(f"{size}\n")
    (folder / "list").write_text("0::/\n")
    monkeypatch.setattr(memory, "CGROUP_ROOT", folder / "groups")
    monkeypatch.setattr(memory, "CGROUP_LIST", folder / "list")
