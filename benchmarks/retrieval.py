"""Measures ScaNN against faiss-cpu: `python -m benchmarks.retrieval [--passages=100000] [--dim=128] [--faiss_python=PYTHON]`.

The passages are those of the built-in world, embedded by the shipped encoder; the queries are those of its questions. Both sides
search the same vectors in turn, with the same number of threads. Our time includes the exact rescoring from the memory-mapped
file. `--dim` above 128 multiplies the vectors by a fixed matrix with orthonormal rows: all inner products stay the same, and all
costs are those of the larger dimension. The index is stored in `--folder`, so a second run does not build it again, and an
interrupted build continues. faiss-cpu needs a separate Python: `python -m venv FOLDER` and then
`FOLDER/bin/pip install faiss-cpu==1.15.1 numpy`. On 2 quiet cores 100,000 passages take about 2 minutes, 1,000,000 about 10.
"""

import argparse
import bisect
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import BenchmarkRow, PeerProcess, elapsed, imports, interleaved_medians, write
from rrl.miniwiki import KINDS, MiniWiki, generate
from rrl.retrieval.dense import ScannIndex
from rrl.retrieval.encode import TextEncoder
from rrl.retrieval.encoder_folder import load_text_encoder
from rrl.retrieval.folder import read_manifest
from rrl.retrieval.index import open_index
from rrl.retrieval.ranking import ranking_recall

ENCODER = "assets/miniwiki-encoder"
QUERIES = 256
"""Number of queries in a search."""
K = 5
"""Number of passages per query."""
OPENINGS = 5
"""How often the index is opened with a filled page cache."""

BUILD = """
import json, resource, sys, time
from pathlib import Path
from benchmarks.retrieval import text_encoder
from rrl.retrieval.build import build_index
from rrl.retrieval.build_state import BuildOptions
folder, dim, memory_gb = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
last, stages = "start", {"start": time.monotonic()}
def progress(stage, done, total):
    if stage not in stages or done == total or not done % 131072:
        print(f"  {stage}: {done}/{total} {time.monotonic() - stages['start']:.0f} s", file=sys.stderr)
    stages.setdefault(stage, time.monotonic())
continued = (folder / "index.unfinished").exists()
options = BuildOptions(memory_gb)
build_index(folder / "corpus.jsonl", folder / "index", "scann", text_encoder(dim), options=options, progress=progress)
times = [*stages.values(), time.monotonic()]
took = {stage: later - sooner for stage, sooner, later in zip(stages, times, times[1:])}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
(folder / "built.json").write_text(json.dumps({"stages": took, "peak_gb": peak, "continued": continued}))
"""
"""Builds the index in a separate process, so that its peak memory is that of building only."""

OPEN = """
import json, pathlib, re, resource, sys, time
from benchmarks.retrieval import text_encoder
from rrl.retrieval.dense import _scann
from rrl.retrieval.index import open_index
def memory(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
encoder = text_encoder(int(sys.argv[2]))
encoder.embed_queries(["compiles"])
_scann()
pathlib.Path("/proc/self/clear_refs").write_text("5")
before, began = memory("VmRSS"), time.perf_counter()
retriever = open_index(sys.argv[1], encoder)
opened = time.perf_counter() - began
(hits,) = retriever.search([sys.argv[3]], 5)
print(json.dumps({"opening": opened, "seconds": time.perf_counter() - began, "hits": len(hits),
                  "after_query": memory("VmRSS") - before, "peak": memory("VmHWM") - before}))
"""
"""Opens the index in a separate process whose encoder and libraries are already loaded. Writing 5
to clear_refs resets the peak memory, VmHWM."""


@dataclasses.dataclass(frozen=True)
class WidenedEncoder:
    """A `TextEncoder` whose vectors are mapped into more dimensions, with the same inner products."""

    narrow: TextEncoder
    dim: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.narrow, name)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the encoder with the number of dimensions."""
        return f"{self.narrow.fingerprint}-{self.dim}"

    def embed_queries(self, queries: Sequence[str]) -> np.ndarray:
        """See `TextEncoder.embed_queries`."""
        return self.narrow.embed_queries(queries) @ self._widening

    def embed_tokens(self, ids: Sequence[Sequence[int]]) -> np.ndarray:
        """See `TextEncoder.embed_tokens`."""
        return self.narrow.embed_tokens(ids) @ self._widening

    @functools.cached_property
    def _widening(self) -> np.ndarray:
        """Matrix (narrow dimensions, `dim`) with orthonormal rows."""
        drawn = np.random.default_rng(0).normal(size=(self.dim, self.narrow.dim))
        return np.linalg.qr(drawn)[0].T.astype(np.float32)


def text_encoder(dim: int) -> Any:
    """Return the shipped encoder with `dim` dimensions."""
    encoder = load_text_encoder(ENCODER)
    return encoder if dim == encoder.dim else WidenedEncoder(encoder, dim)


def prepare(folder: Path, passages: int, dim: int, memory_gb: float | None) -> None:
    """Build the index over a world of this size unless it exists, with the corpus and embedded queries
    beside it."""
    if (folder / "index").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "queries.npy").exists():
        wiki = generate("test", 11, passages, passages // 200)
        with (folder / "corpus.jsonl").open("w") as stream:
            for passage in wiki.passages:
                stream.write(json.dumps(dataclasses.asdict(passage)) + "\n")
        texts = queries(wiki)
        (folder / "queries.json").write_text(json.dumps(texts))
        np.save(folder / "queries.npy", text_encoder(dim).embed_queries(texts))
    subprocess.run([sys.executable, "-c", BUILD, str(folder), str(dim), json.dumps(memory_gb)], check=True)


def queries(wiki: MiniWiki) -> list[str]:
    """Return the distinct search queries of the world's questions."""
    items = [item for kind in KINDS for item in wiki.questions(kind, QUERIES, 0)]
    distinct = list(dict.fromkeys(hop.query for item in items for hop in item.plan.hops))
    return [distinct[i] for i in np.random.default_rng(0).permutation(len(distinct))[:QUERIES]]


def compare(folder: Path, index: ScannIndex, python: str, rounds: int) -> list[BenchmarkRow]:
    """Return rows of queries/s against faiss's flat (exact) index and its IVF index.

    IVF probes the fewest leaves with which it reaches our recall.
    """
    # The embeddings are given, so the texts do not matter.
    embeddings, texts = np.load(folder / "queries.npy"), [""] * QUERIES
    peer = PeerProcess(python, "faiss_search.py", str(folder))
    peer.ask(f"flat {K}")
    # The peer writes the positions of its hits to found.npy.
    exact = np.load(folder / "found.npy")
    recall = ranking_recall(index.search(texts, K, embeddings)[0], exact)

    def ivf_recall(nprobe: int) -> float:
        peer.ask(f"ivf {nprobe} {K}")
        return ranking_recall(np.load(folder / "found.npy"), exact)

    nprobe = bisect.bisect_left(range(1, peer.info["leaves"]), recall, key=ivf_recall) + 1
    reached_recall = ivf_recall(nprobe)
    sides: dict[str, Any] = {
        "ours": lambda: elapsed(lambda: index.search(texts, K, embeddings)),
        "flat": lambda: peer.ask(f"flat {K}")["seconds"],
        "ivf": lambda: peer.ask(f"ivf {nprobe} {K}")["seconds"],
    }
    seconds_of = interleaved_medians(sides, rounds)
    peer.close()
    ours, version = f"{QUERIES / seconds_of['ours']:.0f}/s", peer.info["version"]
    return [
        BenchmarkRow(f"recall@{K} of {QUERIES} queries", f"{recall:.4f}", "1 (flat)", "", "≥ 0.99"),
        BenchmarkRow(
            "queries/s against flat",
            ours,
            f"{QUERIES / seconds_of['flat']:.0f}/s (faiss-cpu {version})",
            f"{seconds_of['flat'] / seconds_of['ours']:.1f}×",
            "≥ 10×",
        ),
        BenchmarkRow(
            f"queries/s against IVF (nprobe {nprobe} of {peer.info['leaves']}, recall {reached_recall:.4f})",
            ours,
            f"{QUERIES / seconds_of['ivf']:.0f}/s",
            f"{seconds_of['ivf'] / seconds_of['ours']:.1f}×",
            "≥ 1×",
        ),
        BenchmarkRow("IVF: time to build", "", f"{peer.info['build_seconds']:.0f} s", "", ""),
    ]


def index_costs(folder: Path, dim: int) -> list[BenchmarkRow]:
    """Return rows of the memory and time of opening the index in a new process, and of building it."""
    query = json.loads((folder / "queries.json").read_text())[0]
    files = [file for file in (folder / "index").rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)

    def open_once() -> dict[str, float]:
        command = [sys.executable, "-c", OPEN, str(folder / "index"), str(dim), query]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return json.loads(output.splitlines()[-1])

    for file in files:
        _drop_from_page_cache(file)
    cold = open_once()
    warm = [open_once() for _ in range(OPENINGS)]
    built = json.loads((folder / "built.json").read_text())
    stages = ", ".join(
        f"{name} {stage_seconds:.0f}" for name, stage_seconds in built["stages"].items() if name != "start"
    )
    continued = ", of a build that was continued" if built["continued"] else ""
    return [
        BenchmarkRow(
            "memory of the open index: after a query, peak",
            f"{cold['after_query'] / 1e6:.0f} MB, {cold['peak'] / 1e6:.0f} MB",
            f"{size / 1e6:.0f} MB on the disk",
            f"{cold['peak'] / size:.2f}",
            "≤ 1.2",
        ),
        *(
            BenchmarkRow(
                f"opening, and opening with the first query, {how}", median_times(openings), "", "", "< 2 s"
            )
            for how, openings in (
                ("empty page cache", [cold]),
                (f"filled page cache (median of {OPENINGS})", warm),
            )
        ),
        BenchmarkRow(
            f"building{continued}: all ({stages}), peak memory",
            f"{sum(built['stages'].values()):.0f} s, {built['peak_gb']:.1f} GB",
            "",
            "",
            "",
        ),
    ]


def median_times(openings: Sequence[dict[str, float]]) -> str:
    """Return the median times, as text, of opening the index, and of opening it and answering a query."""
    return ", ".join(f"{np.median([one[name] for one in openings]):.2f} s" for name in ("opening", "seconds"))


def _drop_from_page_cache(file: Path) -> None:
    """Drop a file from the page cache."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Run all measurements and write the rows."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--passages", type=int, default=100_000, help="number of passages")
    flags.add_argument("--dim", type=int, default=128, help="dimensions of the vectors")
    flags.add_argument("--folder", default="runs/benchmark-retrieval", help="folder of the indexes")
    flags.add_argument("--memory_gb", type=float, default=None, help="memory for building, in 10^9 bytes")
    flags.add_argument("--rounds", type=int, default=5, help="number of timed rounds")
    flags.add_argument("--faiss_python", default=sys.executable, help="Python interpreter with faiss-cpu")
    given = flags.parse_args()
    folder = Path(given.folder) / f"{given.passages}x{given.dim}"
    prepare(folder, given.passages, given.dim, given.memory_gb)
    rows = index_costs(folder, given.dim)  # first, before other code uses memory
    index = open_index(folder / "index", text_encoder(given.dim))._index
    assert isinstance(index, ScannIndex)
    measured = read_manifest(folder / "index")["scann"]["measured"]
    notes = [
        f"ScaNN: {index.config}; recall@{measured['k']} of {measured['queries']} titles while building: {measured['recall']}"
    ]
    if imports(given.faiss_python, "faiss"):
        rows = compare(folder, index, given.faiss_python, given.rounds) + rows
    else:
        rows.insert(
            0, BenchmarkRow("against faiss-cpu", "", "not measured: no faiss in --faiss_python", "", "")
        )
    command = f"python -m benchmarks.retrieval --passages={given.passages} --dim={given.dim}"
    write(f"Retrieval, {given.passages:,} × {given.dim}", command, rows, notes)


if __name__ == "__main__":
    main()
