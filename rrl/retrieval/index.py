"""Make a retriever in memory, or an index folder on disk and open it again, refusing one that does not fit.

An index folder holds `manifest.json`, `passages.jsonl` with the offset of each line, and what the kind needs:
`embeddings.npy` (memory-mapped) and `scann/`, or `bm25/`. Nothing in it is an absolute path, so it can be moved.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from rrl.data.passages import Passage, fingerprint
from rrl.errors import UserError
from rrl.retrieval.bm25 import Bm25Config, Bm25Index
from rrl.retrieval.dense import ExactIndex, ScannConfig, ScannIndex
from rrl.retrieval.retriever import Index, Retriever

if TYPE_CHECKING:  # BM25 needs no JAX, so opening it does not import any.
    from rrl.retrieval.encode import TextEncoder

KINDS = ("scann", "bm25", "exact")
FORMAT = 1
HASHED_BYTES = 64 << 20
"""Files up to this size are checked byte by byte at opening, larger ones by their size."""


def make_retriever(
    passages: Sequence[Passage],
    kind: str = "scann",
    text_encoder: "TextEncoder | None" = None,
    bm25: Bm25Config | None = None,
) -> Retriever:
    """A retriever over passages in memory. Raises UserError for an unknown kind, no passages or a missing encoder."""
    _check(passages, kind, text_encoder)
    index: Index
    if kind == "bm25":
        index = Bm25Index.build(passages, bm25)
    else:
        assert text_encoder is not None
        embeddings = text_encoder.embed_passages(passages)
        index = ScannIndex.build(embeddings) if kind == "scann" else ExactIndex(embeddings)
    return Retriever(passages, index, text_encoder)


def build_index(
    passages: Sequence[Passage],
    out: str | Path,
    kind: str = "scann",
    text_encoder: "TextEncoder | None" = None,
    bm25: Bm25Config | None = None,
) -> None:
    """Write an index folder. It appears under its name only when it is complete.

    Raises UserError as `make_retriever` does, and if `out` exists.
    """
    _check(passages, kind, text_encoder)
    out = Path(out)
    if out.exists():
        raise UserError(f"index folder {out}: exists. Remove it, or give the path of a new folder.")
    work = out.with_name(out.name + ".unfinished")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    _write_passages(work, passages)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "kind": kind,
        "passages": len(passages),
        "corpus": fingerprint(passages),
        "versions": {name: importlib.metadata.version(name) for name in ("numpy", "bm25s", "scann")},
    }
    if kind == "bm25":
        Bm25Index.build(passages, bm25).save(work / "bm25")
    else:
        assert text_encoder is not None
        embeddings = text_encoder.embed_passages(passages)
        np.save(work / "embeddings.npy", embeddings)
        manifest |= {"metric": "inner_product", "dim": text_encoder.dim}
        manifest["encoder"] = {"name": text_encoder.name, "fingerprint": text_encoder.fingerprint}
        if kind == "scann":
            config = ScannConfig.for_corpus(len(passages))
            ScannIndex.build(embeddings, config).save(work / "scann")
            manifest["scann"] = dataclasses.asdict(config)
    manifest["files"] = {name: _stamp(work / name) for name in _files(work)}
    (work / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    work.rename(out)


def open_index(folder: str | Path, text_encoder: "TextEncoder | None" = None) -> Retriever:
    """Open an index folder, passages and embeddings memory-mapped.

    Raises UserError naming the folder and what is wrong: no index, unfinished, damaged, or built with another encoder.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    index: Index
    if manifest["kind"] == "bm25":
        index = Bm25Index.load(folder / "bm25")
    else:
        _check_encoder(folder, manifest, text_encoder)
        embeddings = np.load(folder / "embeddings.npy", mmap_mode="r")
        if embeddings.shape != (manifest["passages"], manifest["dim"]):
            raise _damaged(folder, f"embeddings.npy has shape {embeddings.shape}")
        if manifest["kind"] == "scann":
            index = ScannIndex.load(folder / "scann", embeddings, ScannConfig(**manifest["scann"]))
        else:
            index = ExactIndex(embeddings)
    return Retriever(PassageFile(folder, manifest["passages"]), index, text_encoder)


class PassageFile(Sequence[Passage]):
    """The passages of an index folder; each is read from the file when it is asked for. Thread-safe."""

    def __init__(self, folder: Path, count: int):
        self._offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        if self._offsets.shape != (count + 1,):
            raise _damaged(folder, f"offsets.npy has shape {self._offsets.shape}")
        self._file = os.open(folder / "passages.jsonl", os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

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


def _write_passages(folder: Path, passages: Sequence[Passage]) -> None:
    offsets = np.zeros(len(passages) + 1, np.int64)
    with (folder / "passages.jsonl").open("wb") as stream:
        for number, passage in enumerate(passages, 1):
            # ASCII escapes carry every string, lone surrogates too.
            offsets[number] = offsets[number - 1] + stream.write(
                json.dumps(dataclasses.asdict(passage)).encode() + b"\n"
            )
    np.save(folder / "offsets.npy", offsets)


def _check(passages: Sequence[Passage], kind: str, text_encoder: "TextEncoder | None") -> None:
    if kind not in KINDS:
        raise UserError(f"retriever kind: got {kind!r}; allowed are {', '.join(KINDS)}.")
    if not len(passages):
        raise UserError("corpus: it has no passages; an index needs at least one. Check the corpus file.")
    if kind != "bm25" and text_encoder is None:
        raise UserError(
            f"encoder: missing; a {kind} index needs one. Give an encoder folder, or use kind 'bm25'."
        )


def _check_encoder(folder: Path, manifest: dict[str, Any], text_encoder: "TextEncoder | None") -> None:
    built = manifest["encoder"]
    if text_encoder is None:
        raise UserError(
            f"index {folder}: needs the encoder it was built with, {built['name']!r}. Give its folder."
        )
    if text_encoder.fingerprint != built["fingerprint"]:
        raise UserError(
            f"index {folder}: built with the encoder {built['name']!r} ({built['fingerprint'][:12]}), got "
            f"{text_encoder.name!r} ({text_encoder.fingerprint[:12]}). Give that encoder, or build the index again."
        )


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / "manifest.json"
    if not file.is_file():
        raise UserError(
            f"index {folder}: no manifest.json; not an index folder, or its building was not finished."
        )
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        kind, form, files = manifest["kind"], manifest["format"], manifest["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"manifest.json cannot be read ({error!r})") from error
    if form != FORMAT or kind not in KINDS:
        raise UserError(
            f"index {folder}: format {form!r} and kind {kind!r}; this version reads format {FORMAT}."
        )
    for name, stamp in files.items():
        if not (folder / name).is_file():
            raise _damaged(folder, f"{name} is missing")
        if _stamp(folder / name) != stamp:
            raise _damaged(folder, f"{name} is not the file that was written")
    return manifest


def _damaged(folder: Path, what: str) -> UserError:
    return UserError(f"index {folder}: damaged, {what}. Build it again.")


def _files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def _stamp(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    if size > HASHED_BYTES:
        return {"bytes": size}
    return {"bytes": size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
