"""Choose ScaNN's settings from the number of passages and the available memory. Read `choose_scann` first."""

import dataclasses
import math
import os
from collections.abc import Iterable

from rrl.errors import UserError

BRUTE_FORCE_BELOW = 20_000
"""Corpora with fewer passages use brute force, which is as fast as a tree there, and exact."""

GB = 10**9

INITIAL_REORDER = 100
"""Initial number of candidates that a search rescores; `tune_recall` may raise it."""

_PASSAGE_BYTES = 12
"""Bytes per passage, however often it is stored: its leaf in ScaNN's tables, its entry in the file of offsets."""

_ID_BYTES = 4
"""Bytes that ScaNN adds to each stored code of a passage, for an int32 id."""

_ACCURACY_LEVELS = ((2, True), (2, False), (4, False), (8, False))
"""(code_dims, spilled) of `ScannConfig`, from the most to the least accurate, which is also from the most to the least memory."""


@dataclasses.dataclass(frozen=True)
class ScannConfig:
    """Settings of a ScaNN index; `choose_scann` finds them."""

    leaves: int
    """Partitions of the tree; 0: no tree, every passage is scored."""
    leaves_to_search: int
    reorder: int
    """Candidates whose quantised scores are replaced by exact ones, computed from the embeddings on disk. ScaNN can also hold
    the vectors in memory, but then a search had a tenth of the queries/s, and opening took three times the memory and time."""
    code_dims: int = 2
    """Dimensions that share one code of 4 bits."""
    spilled: bool = False
    """Whether each passage is also stored in a second leaf (SOAR, Sun et al. 2023): the same recall from half the leaves."""
    part: int = 0
    """Size of each part of the index, in passages; 0: the index is one part. Parts bound the memory of a build, because ScaNN
    holds the vectors of one part at a time."""

    def parts(self, passages: int) -> list[tuple[int, int]]:
        """Return the (start, stop) of each part, in order."""
        size = self.part or max(1, passages)
        return [(start, min(passages, start + size)) for start in range(0, passages, size)]


def serving_bytes(config: ScannConfig, passages: int, dim: int) -> int:
    """Return the memory of an open index, in bytes. Embeddings and passages stay on disk, except for brute force.

    Measured after a query: 205 to 228 MB; this function gives 215 (1,000,000 × 384, spilled).
    """
    if not config.leaves:
        return passages * dim * 4
    copies = 2 if config.spilled else 1
    code_bytes = copies * (math.ceil(dim / config.code_dims) / 2 + _ID_BYTES)
    tree_bytes = len(config.parts(passages)) * config.leaves * dim * 4
    return round(passages * (code_bytes + _PASSAGE_BYTES)) + tree_bytes


def training_sample(config: ScannConfig, passages: int) -> int:
    """Return the number of passages on which the leaves are trained."""
    return min(passages, max(100 * config.leaves, 20_000))


def building_bytes(config: ScannConfig, passages: int, dim: int) -> int:
    """Return the memory, in bytes, while the largest part is indexed.

    It is the sum of three copies of the part's vectors (one as read, two in ScaNN), the training sample, and the part's index.
    Measured for the whole process: 5.2 GB, where this function gives 5.1 (1,000,000 × 384); 290 MB, where it gives 195
    (100,000 × 128), because mapped pages are included in the measurement.
    """
    part = min(passages, config.part or passages)
    vectors = 3 * part + training_sample(config, part)
    return vectors * dim * 4 + serving_bytes(dataclasses.replace(config, part=0), part, dim)


def codes_bytes(config: ScannConfig, passages: int, dim: int) -> int:
    """Return the size of ScaNN's files, in bytes: its codes, one byte each on disk."""
    if not config.leaves:
        return 0
    copies = 2 if config.spilled else 1
    return passages * copies * (math.ceil(dim / config.code_dims) + _ID_BYTES)


def disk_bytes(config: ScannConfig, passages: int, dim: int, characters: int = 700) -> int:
    """Return the size of the index folder, in bytes; `characters` is the mean length of a passage with its title."""
    return passages * (dim * 4 + characters + 8) + codes_bytes(config, passages, dim)


def choose_scann(passages: int, dim: int, memory_gb: float | None = None) -> ScannConfig:
    """Return the most accurate settings that fit the memory.

    The tree has about 2·sqrt(n) leaves. A twentieth of them is searched at first; `tune_recall` raises the number
    until the index has its target recall. With half as many leaves, searching 100,000 passages of miniwiki (the
    generated corpus of rrl) took 1.5 times as long.

    Args:
      passages: number of passages, n.
      dim: length of an embedding.
      memory_gb: memory in 10^9 bytes; None: `machine_gb`.

    Raises UserError with the smallest sufficient memory.
    """
    if passages < BRUTE_FORCE_BELOW:
        return ScannConfig(leaves=0, leaves_to_search=0, reorder=0)
    budget = (memory_gb if memory_gb is not None else machine_gb()) * GB
    least = math.inf
    for code_dims, spilled in _ACCURACY_LEVELS:
        for parts in range(1, 65):
            part = math.ceil(passages / parts)
            leaves = round(2 * math.sqrt(part))
            config = ScannConfig(
                leaves, max(10, leaves // 20), INITIAL_REORDER, code_dims, spilled, part if parts > 1 else 0
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
    """Return the memory that an index may use, in 10^9 bytes: four fifths of the machine's memory."""
    return 0.8 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GB


def sizing_table(sizes: Iterable[int] = (10**6, 21 * 10**6, 10**8), dim: int = 768) -> str:
    """Return a Markdown table of the choices of `choose_scann` for several budgets, for the docs."""
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
            gigabytes = (
                f"{needed_bytes(config, size, dim) / GB:.1f}"
                for needed_bytes in (serving_bytes, building_bytes, disk_bytes)
            )
            cells = (
                f"{size:,}",
                budget,
                f"{config.leaves:,}",
                len(config.parts(size)),
                f"{config.code_dims} dimensions",
                "yes" if config.spilled else "no",
                *gigabytes,
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
