"""An index folder: its manifest, the check that every file is what was written, and passages read when asked for.

It holds `manifest.json`, `passages.jsonl` with the offset of each line, and what the kind needs: `embeddings.npy` and
`scann/`, or `bm25/`. Nothing in it is an absolute path, so it can be moved.
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
from rrl.retrieval.disk_space import room_for

KINDS = ("scann", "bm25", "exact")
FORMAT = 3
HASHED_BYTES = 64 << 20
"""Files up to this size are checked byte by byte at opening, larger ones by their size and `PIECES`."""
PIECES, PIECE_BYTES = 64, 256 << 10
"""Of a large file, from its first to its last byte."""


class PassageFile(Sequence[Passage]):
    """The passages of an index folder; each is read from the file when it is asked for. Thread-safe."""

    def __init__(self, folder: Path, count: int):
        self._offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        if self._offsets.shape != (count + 1,):
            raise damaged(folder, f"offsets.npy has shape {self._offsets.shape}")
        self._file = os.open(folder / "passages.jsonl", os.O_RDONLY)
        # Not __del__, in which `os` may be gone when the interpreter ends.
        weakref.finalize(self, os.close, self._file)

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
        # pread moves no shared file position, so threads do not disturb each other.
        return Passage(**json.loads(os.pread(self._file, int(end - start), int(start))))

    def __iter__(self) -> Iterator[Passage]:
        return (self[i] for i in range(len(self)))


def write_passages(folder: Path, passages: Iterable[Passage]) -> tuple[int, str]:
    """Write what `PassageFile` reads, as they come; returns how many there are and their fingerprint."""
    offsets = array.array("q", [0])
    with atomic_stream(folder / "passages.jsonl") as stream:
        corpus = fingerprint(_written(stream, offsets, passages))
    places = np.asarray(offsets, np.int64)
    with room_for(places.nbytes, folder), atomic_stream(folder / "offsets.npy") as stream:
        np.save(stream, places)
    return len(offsets) - 1, corpus


def _written(stream: BinaryIO, offsets: array.array, passages: Iterable[Passage]) -> Iterator[Passage]:
    for passage in passages:
        # ASCII escapes carry every string, lone surrogates too.
        line = json.dumps(dataclasses.asdict(passage)).encode() + b"\n"
        offsets.append(offsets[-1] + stream.write(line))
        yield passage


def write_manifest(folder: Path, manifest: dict[str, Any], without: Sequence[str] = ()) -> None:
    """Write the manifest, last of all: with versions, and a stamp of every file there but those named."""
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "bm25s", "scann")}
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    left_out = {"manifest.json", *without}
    stamps = {name: stamp(folder / name) for name in files if name not in left_out}
    whole = {"format": FORMAT, **manifest, "versions": versions, "files": stamps}
    with atomic_stream(folder / "manifest.json") as stream:
        stream.write(json.dumps(whole, indent=2).encode() + b"\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an index; UserError for a folder that is none, or holds other files than were written."""
    file = folder / "manifest.json"
    if not file.is_file():
        raise UserError(
            f"index {folder}: no manifest.json; not an index folder, or its building was not finished."
        )
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        kind, form, files = manifest["kind"], manifest["format"], manifest["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(folder, f"manifest.json cannot be read ({error!r})") from error
    if form != FORMAT or kind not in KINDS:
        raise UserError(
            f"index {folder}: format {form!r} and kind {kind!r}; this version reads format {FORMAT}. "
            "Build it again."
        )
    for name, held in files.items():
        if not (folder / name).is_file():
            raise damaged(folder, f"{name} is missing")
        # Until large files had pieces, their stamp was their size.
        if not held.items() <= stamp(folder / name).items():
            raise damaged(folder, f"{name} is not the file that was written")
    return manifest


def index_identity(folder: str | Path) -> dict[str, Any]:
    """What an index finds, wherever it lies: its kind, corpus, encoder and settings; `title_weight` 0 where texts were embedded
    without their titles."""
    manifest = read_manifest(Path(folder))
    found = {name: manifest.get(name) for name in ("kind", "corpus", "encoder", "bm25")}
    return found | ({"title_weight": manifest["title_weight"]} if "title_weight" in manifest else {})


def damaged(folder: Path, what: str) -> UserError:
    """The error of an index folder that is not what was written."""
    return UserError(f"index {folder}: damaged, {what}. Build it again.")


def stamp(file: Path) -> dict[str, Any]:
    """Size of a file and a hash of its content, of a large one in `PIECES` places."""
    size, digest = file.stat().st_size, hashlib.sha256()
    starts: Iterable[int] = range(0, size, PIECE_BYTES)
    if size > HASHED_BYTES:
        starts = np.linspace(0, size - PIECE_BYTES, PIECES, dtype=np.int64).tolist()
    with file.open("rb") as stream:
        for start in starts:
            stream.seek(start)
            digest.update(stream.read(PIECE_BYTES))
    return {"bytes": size, "sha256": digest.hexdigest()}
