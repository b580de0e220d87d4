"""ScaNN's settings from the number of passages and the memory there is; and the table of them in the docs."""

import dataclasses
import math
import os
from collections.abc import Iterable

from rrl.errors import UserError

SMALL = 20_000
"""Below this, scoring every passage is as fast as a tree, and exact."""

GB = 10**9

_OVERHEAD = 12
"""Bytes a passage beside its codes: its leaf in ScaNN's tables, its place in the file of offsets."""

_LEVELS = ((2, True), (2, False), (4, False), (8, False))
"""(dimensions of one 4-bit code, spilled), see `ScannConfig`; by falling accuracy and memory."""


@dataclasses.dataclass(frozen=True)
class ScannConfig:
    """Settings of a ScaNN index; `choose_scann` finds them."""

    leaves: int
    """Partitions of the tree; 0: no tree, every passage is scored."""
    leaves_to_search: int
    reorder: int
    """Candidates whose quantised scores are replaced by exact ones, from the embeddings on the disk. (Vectors held in memory
    for that bring a tenth of the queries/s, and three times the memory and the time of opening.)"""
    code_dims: int = 2
    """Dimensions that share one code of 4 bits."""
    spilled: bool = False
    """Whether each passage stands in a second leaf too (SOAR, Sun et al. 2023): the same recall from half the leaves."""
    part: int = 0
    """Passages that are indexed together, since ScaNN holds their vectors while it builds; 0: all."""

    def parts(self, passages: int) -> list[tuple[int, int]]:
        """The (start, stop) of each part, in turn."""
        size = self.part or max(1, passages)
        return [(start, min(passages, start + size)) for start in range(0, passages, size)]


def serving_bytes(config: ScannConfig, passages: int, dim: int) -> int:
    """Memory of an open index. Embeddings and passages stay on the disk, but for brute force.

    After a query 205 to 228 MB were measured where this says 215 (1,000,000 × 384, spilled).
    """
    if not config.leaves:
        return passages * dim * 4
    leaves = 2 if config.spilled else 1
    vector = leaves * (math.ceil(dim / config.code_dims) / 2 + 4)
    trees = len(config.parts(passages)) * config.leaves * dim * 4
    return round(passages * (vector + _OVERHEAD)) + trees


def training_sample(config: ScannConfig, passages: int) -> int:
    """Passages on which the leaves are trained."""
    return min(passages, max(100 * config.leaves, 20_000))


def building_bytes(config: ScannConfig, passages: int, dim: int) -> int:
    """Memory while the largest part is indexed: three times its vectors (as read, and two copies in ScaNN's hands), the
    training sample, and its own index. Measured: 5.2 GB, with the process around it, where this says 5.1 (1,000,000 × 384);
    290 MB where it says 195 (100,000 × 128), for the pages that are mapped count too.
    """
    part = min(passages, config.part or passages)
    vectors = 3 * part + training_sample(config, part)
    return vectors * dim * 4 + serving_bytes(dataclasses.replace(config, part=0), part, dim)


def codes_bytes(config: ScannConfig, passages: int, dim: int) -> int:
    """Size of what ScaNN writes: its codes, a byte each on the disk."""
    if not config.leaves:
        return 0
    leaves = 2 if config.spilled else 1
    return passages * leaves * (math.ceil(dim / config.code_dims) + 4)


def disk_bytes(config: ScannConfig, passages: int, dim: int, characters: int = 700) -> int:
    """Size of the index folder; `characters` is the mean passage with its title."""
    return passages * (dim * 4 + characters + 8) + codes_bytes(config, passages, dim)


def choose_scann(passages: int, dim: int, memory_gb: float | None = None) -> ScannConfig:
    """Settings that fit the memory, the most accurate first; `memory_gb` in 10^9 bytes, None: `machine_gb`.

    A tree of about 2·sqrt(n) leaves, of which a twentieth is searched at first (the build searches more until the recall
    is right). 100,000 passages of the built-in world in half as many leaves took half as much again to search. Raises
    UserError with the least memory that would do.
    """
    if passages < SMALL:
        return ScannConfig(leaves=0, leaves_to_search=0, reorder=0)
    budget = (memory_gb if memory_gb is not None else machine_gb()) * GB
    least = math.inf
    for code_dims, spilled in _LEVELS:
        for count in range(1, 65):
            part = math.ceil(passages / count)
            leaves = round(2 * math.sqrt(part))
            config = ScannConfig(
                leaves, max(10, leaves // 20), 100, code_dims, spilled, part if count > 1 else 0
            )
            needed = max(serving_bytes(config, passages, dim), building_bytes(config, passages, dim))
            least = min(least, needed)
            if needed <= budget:
                return config
    raise UserError(
        f"memory_gb={budget / GB:.3g} is too little for {passages} passages of {dim} dimensions: at least "
        f"{least / GB:.3g} are needed. Give more, or index the corpus in shards on several hosts."
    )


def machine_gb() -> float:
    """Memory of this machine that an index may take, in 10^9 bytes: four fifths of it all, whatever else runs."""
    return 0.8 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GB


def sizing_table(sizes: Iterable[int] = (10**6, 21 * 10**6, 10**8), dim: int = 768) -> str:
    """Markdown: what `choose_scann` does with several budgets, for the docs."""
    lines = [
        f"| passages × {dim} | `--memory_gb` | leaves | parts | 4-bit code of | in two leaves "
        "| open, GB | building, GB | disk, GB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size in sizes:
        for budget in (8, 32, 128, 512):
            try:
                config = choose_scann(size, dim, budget)
            except UserError:
                lines.append(f"| {size:,} | {budget} | too little | | | | | | |")
                continue
            sums = (
                f"{count(config, size, dim) / GB:.1f}"
                for count in (serving_bytes, building_bytes, disk_bytes)
            )
            cells = (
                f"{size:,}",
                budget,
                f"{config.leaves:,}",
                len(config.parts(size)),
                f"{config.code_dims} dimensions",
                "yes" if config.spilled else "no",
                *sums,
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
