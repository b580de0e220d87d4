"""ScaNN against faiss-cpu: `python -m benchmarks.retrieval [--passages=100000] [--faiss_python=PYTHON]`.

Passages of the built-in world, embedded by the shipped encoder; queries as its questions ask them. Both sides search the
same vectors with the same number of threads, in turn; ours includes the exact rescoring from the memory-mapped file.
The index is kept in `--folder`, so that a second run does not build again. faiss-cpu comes in a Python of its own:
`python -m venv FOLDER && FOLDER/bin/pip install faiss-cpu==1.15.1 numpy`.
"""

import argparse
import bisect
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Peer, Row, alternate, imports, seconds, write
from rrl.data.miniwiki import KINDS, MiniWiki, generate
from rrl.retrieval.build import build_index
from rrl.retrieval.dense import ScannIndex
from rrl.retrieval.encode import load_text_encoder
from rrl.retrieval.folder import read_manifest
from rrl.retrieval.index import open_index
from rrl.retrieval.ranking import overlap

ENCODER = "assets/miniwiki-encoder"
QUERIES, K = 256, 5

OPENED = """
import json, resource, sys, time
def held():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
import numpy as np
from rrl.retrieval.dense import ScannIndex, _scann
from rrl.retrieval.folder import PassageFile, read_manifest
from rrl.retrieval.sizing import ScannConfig
from pathlib import Path
_scann()
folder, before, began = Path(sys.argv[1]), held(), time.perf_counter()
manifest = read_manifest(folder)
settings = {name: value for name, value in manifest["scann"].items() if name != "measured"}
vectors = np.load(folder / "embeddings.npy", mmap_mode="r")
index = ScannIndex.load(folder / "scann", vectors, ScannConfig(**settings))
passages = PassageFile(folder, len(vectors))
ids, _ = index.search([""], 5, np.load(folder.parent / "queries.npy")[:1])
[passages[int(i)] for i in ids[0]]
print(json.dumps({"seconds": time.perf_counter() - began, "bytes": held() - before}))
"""


def prepared(folder: Path, passages: int, memory_gb: float | None) -> ScannIndex:
    """The index over a world of this size, built unless it is there, and queries beside it."""
    encoder = load_text_encoder(ENCODER)
    if not (folder / "index").exists():
        wiki = generate("test", 11, passages, passages // 200)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "queries.npy", encoder.embed_queries(queries(wiki)))
        began = time.monotonic()
        build_index(
            wiki.passages,
            folder / "index",
            "scann",
            encoder,
            memory_gb=memory_gb,
            progress=lambda stage, done, total: print(f"  {stage}: {done}/{total}", file=sys.stderr),
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        (folder / "built.json").write_text(json.dumps({"seconds": time.monotonic() - began, "peak_gb": peak}))
    index = open_index(folder / "index", encoder)._index
    assert isinstance(index, ScannIndex)
    return index


def queries(wiki: MiniWiki) -> list[str]:
    """What the world's questions search for, without repetitions."""
    items = [item for kind in KINDS for item in wiki.questions(kind, QUERIES, 0)]
    found = list(dict.fromkeys(hop.query for item in items for hop in item.plan.hops))
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))[:QUERIES]]


def compare(folder: Path, index: ScannIndex, python: str, rounds: int) -> list[Row]:
    """Rows of queries/s against faiss's flat index, and its IVF at our recall or better."""
    asked, texts = np.load(folder / "queries.npy"), [""] * QUERIES
    peer = Peer(python, "faiss_search.py", str(folder))
    peer.ask(f"flat {K}")
    exact = np.load(folder / "found.npy")
    recall = overlap(index.search(texts, K, asked)[0], exact)

    def ivf_recall(nprobe: int) -> float:
        peer.ask(f"ivf {nprobe} {K}")
        return overlap(np.load(folder / "found.npy"), exact)

    nprobe = bisect.bisect_left(range(1, peer.says["leaves"]), recall, key=ivf_recall) + 1
    equal = ivf_recall(nprobe)
    sides: dict[str, Any] = {
        "ours": lambda: seconds(lambda: index.search(texts, K, asked)),
        "flat": lambda: peer.ask(f"flat {K}")["seconds"],
        "ivf": lambda: peer.ask(f"ivf {nprobe} {K}")["seconds"],
    }
    took = alternate(sides, rounds)
    peer.close()
    name, ours = f"{len(index.embeddings):,} × {index.embeddings.shape[1]}", f"{QUERIES / took['ours']:.0f}/s"
    return [
        Row(f"{name}, recall@{K} of {QUERIES} queries", f"{recall:.4f}", "1 (flat)", "", "≥ 0.99"),
        Row(
            f"{name}, queries/s against flat",
            ours,
            f"{QUERIES / took['flat']:.0f}/s",
            f"{took['flat'] / took['ours']:.1f}×",
            "≥ 10×",
        ),
        Row(
            f"{name}, queries/s against IVF (nprobe {nprobe} of {peer.says['leaves']}, recall {equal:.4f})",
            ours,
            f"{QUERIES / took['ivf']:.0f}/s",
            f"{took['ivf'] / took['ours']:.1f}×",
            "≥ 1×",
        ),
    ]


def opening(folder: Path) -> list[Row]:
    """Rows of memory and time of opening the index in a fresh process, and its first answer."""
    output = subprocess.run(
        [sys.executable, "-c", OPENED, str(folder / "index")], check=True, capture_output=True, text=True
    ).stdout
    found = json.loads(output.splitlines()[-1])
    size = sum(file.stat().st_size for file in (folder / "index").rglob("*") if file.is_file())
    built, manifest = json.loads((folder / "built.json").read_text()), read_manifest(folder / "index")
    name, measured = f"{manifest['passages']:,} × {manifest['dim']}", manifest["scann"]["measured"]
    return [
        Row(
            f"{name}, memory of the open index after a query",
            f"{found['bytes'] / 1e6:.0f} MB",
            f"{size / 1e6:.0f} MB on the disk",
            f"{found['bytes'] / size:.2f}",
            "≤ 1.2",
        ),
        Row(f"{name}, opening and first query", f"{found['seconds']:.2f} s", "", "", "< 2 s"),
        Row(
            f"{name}, building: all, ScaNN alone, peak memory",
            f"{built['seconds']:.0f} s, {measured['build_seconds']:.0f} s, {built['peak_gb']:.1f} GB",
            "",
            "",
            "",
        ),
    ]


def main() -> None:
    """Measures and writes the rows."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--passages", type=int, default=100_000)
    flags.add_argument("--folder", default="runs/benchmark-retrieval")
    flags.add_argument("--memory_gb", type=float, default=None)
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--faiss_python", default=sys.executable)
    given = flags.parse_args()
    folder = Path(given.folder) / str(given.passages)
    index = prepared(folder, given.passages, given.memory_gb)
    notes = [f"ScaNN: {index.config}"]
    if imports(given.faiss_python, "faiss"):
        rows = compare(folder, index, given.faiss_python, given.rounds)
    else:
        rows = [Row("against faiss-cpu", "", "not measured: no faiss in --faiss_python", "", "")]
    command = f"python -m benchmarks.retrieval --passages={given.passages}"
    write(f"Retrieval, {given.passages:,} passages", command, rows + opening(folder), notes)


if __name__ == "__main__":
    main()
