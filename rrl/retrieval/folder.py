"""Read and write an index folder: its manifest, a check of every file, and its passages, which are read on demand.

The folder holds `manifest.json`, `passages.jsonl`, the offset of each line in `offsets.npy`, and the files of its kind:
`embeddings.npy` and `scann/`, or `bm25/`. It holds no absolute paths, so it can be moved.
"""

import array
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np

from rrl.data.passages import Passage, fingerprint
from rrl.errors import UserError
from rrl.files import atomic_stream
from rrl.retrieval.disk_space import detect_disk_full

KINDS = ("scann", "bm25", "exact")
FORMAT = 3
"""Version of the folder's layout; other versions are not read."""
HASHED_BYTES = 64 << 20
"""Files up to this size are hashed completely. Of larger files only `SAMPLES` chunks are hashed."""
SAMPLES, SAMPLE_BYTES = 64, 256 << 10
"""Number and size of the chunks that are hashed of a large file, evenly spaced from its first to its last byte."""


class PassageFile(Sequence[Passage]):
    """The passages of an index folder, as a sequence. Each is read from the file on access. Thread-safe."""

    def __init__(self, folder: Path, count: int):
        self._offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        if self._offsets.shape != (count + 1,):
            raise damaged_error(folder, f"offsets.npy has shape {self._offsets.shape}")
        self._descriptor = os.open(folder / "passages.jsonl", os.O_RDONLY)
        # Not in __del__: `os` may be gone by then when the interpreter exits.
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Passage: ...
    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...
    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        start, end = self._offsets[index % len(self)], self._offsets[index % len(self) + 1]
        # pread does not move the shared file position, so it is thread-safe.
        return Passage(**json.loads(os.pread(self._descriptor, int(end - start), int(start))))

    def __iter__(self) -> Iterator[Passage]:
        return (self[i] for i in range(len(self)))


def write_passages(folder: Path, passages: Iterable[Passage]) -> tuple[int, str]:
    """Stream passages into the files that `PassageFile` reads; return their number and their fingerprint."""
    offsets = array.array("q", [0])
    with atomic_stream(folder / "passages.jsonl") as stream:
        corpus_fingerprint = fingerprint(_write_each(stream, offsets, passages))
    offset_array = np.asarray(offsets, np.int64)
    with detect_disk_full(offset_array.nbytes, folder), atomic_stream(folder / "offsets.npy") as stream:
        np.save(stream, offset_array)
    return len(offsets) - 1, corpus_fingerprint


def _write_each(stream: BinaryIO, offsets: array.array, passages: Iterable[Passage]) -> Iterator[Passage]:
    """Write each passage as a line, append the line's end to `offsets`, and yield the passage."""
    for passage in passages:
        # ASCII escapes can represent every string, even lone surrogates.
        line = json.dumps(dataclasses.asdict(passage)).encode() + b"\n"
        offsets.append(offsets[-1] + stream.write(line))
        yield passage


def write_manifest(folder: Path, manifest: dict[str, Any], exclude: Sequence[str] = ()) -> None:
    """Write the manifest as the last file: with library versions, and size and hash of every file except those in `exclude`."""
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "bm25s", "scann")}
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    excluded = {"manifest.json", *exclude}
    checksums = {name: size_and_hash(folder / name) for name in files if name not in excluded}
    complete = {"format": FORMAT, **manifest, "versions": versions, "files": checksums}
    with atomic_stream(folder / "manifest.json") as stream:
        stream.write(json.dumps(complete, indent=2).encode() + b"\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of an index. Raises UserError if the folder is not an index or its files have changed."""
    file = folder / "manifest.json"
    if not file.is_file():
        raise UserError(
            f"index {folder}: no manifest.json. It is not an index folder, or its build did not finish."
        )
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        kind, version, files = manifest["kind"], manifest["format"], manifest["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged_error(folder, f"manifest.json cannot be read ({error!r})") from error
    if version != FORMAT or kind not in KINDS:
        raise UserError(
            f"index {folder}: format {version!r} and kind {kind!r}; this version reads format {FORMAT}. "
            "Build it again."
        )
    for name, recorded in files.items():
        if not (folder / name).is_file():
            raise damaged_error(folder, f"{name} is missing")
        # Older indexes record only the size of large files.
        if not recorded.items() <= size_and_hash(folder / name).items():
            raise damaged_error(folder, f"{name} is not the file that was written")
    return manifest


def index_identity(folder: str | Path) -> dict[str, Any]:
    """Return the entries of the manifest that determine the search results: kind, corpus, encoder and BM25 settings.

    If passages were embedded without their titles, there is a further entry: `title_weight`, which is 0. Two folders with equal
    entries return the same passages. The exception are ScaNN trees: two builds of one corpus return different passages for a few
    queries in a hundred.
    """
    manifest = read_manifest(Path(folder))
    identity = {name: manifest.get(name) for name in ("kind", "corpus", "encoder", "bm25")}
    return identity | ({"title_weight": manifest["title_weight"]} if "title_weight" in manifest else {})


def damaged_error(folder: Path, what: str) -> UserError:
    """Return the error for an index folder whose files are missing or have changed."""
    return UserError(f"index {folder}: damaged, {what}. Build it again.")


def size_and_hash(file: Path) -> dict[str, Any]:
    """Return the size of a file and a hash of its content; of a large file, a hash of `SAMPLES` chunks."""
    size, digest = file.stat().st_size, hashlib.sha256()
    starts: Iterable[int] = range(0, size, SAMPLE_BYTES)
    if size > HASHED_BYTES:
        starts = np.linspace(0, size - SAMPLE_BYTES, SAMPLES, dtype=np.int64).tolist()
    with file.open("rb") as stream:
        for start in starts:
            stream.seek(start)
            digest.update(stream.read(SAMPLE_BYTES))
    return {"bytes": size, "sha256": digest.hexdigest()}
