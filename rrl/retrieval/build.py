"""Build an index folder block by block, so that a killed build can continue.

The corpus need not fit in memory, unless it is a single JSON document. Read `build_index` first.

Until the index is complete, its folder is named OUT.unfinished. After a kill, the corpus is read again from the start, unless it
is a file that was read to its end. The slow stages (embedding, counting words, ScaNN) continue after their last complete block
or part.
"""

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rrl.data.passages import Passage
from rrl.errors import UserError
from rrl.files import exclusive_lock
from rrl.retrieval.bm25 import ANALYSIS_VERSION, Bm25Config, Bm25Index
from rrl.retrieval.build_corpus import write_corpus
from rrl.retrieval.build_embeddings import write_embeddings
from rrl.retrieval.build_scann import build_scann
from rrl.retrieval.build_state import (
    STATE_FILES,
    BuildOptions,
    Progress,
    check_settings,
    explain_deleted_folder,
    make_unfinished_folder,
)
from rrl.retrieval.disk_space import explain_disk_full
from rrl.retrieval.folder import KINDS, PassageFile, write_manifest
from rrl.retrieval.postings import PostingsFolder

if TYPE_CHECKING:  # Importing it imports JAX, which BM25 does not need.
    from rrl.retrieval.encode import TextEncoder


def build_index(
    corpus: str | Path | Iterable[Passage],
    out: str | Path,
    kind: str = "scann",
    text_encoder: "TextEncoder | None" = None,
    bm25: Bm25Config | None = None,
    *,
    options: BuildOptions | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Write an index folder. It gets its final name only when it is complete.

    The same call continues a killed build. Other settings for the same unfinished folder raise an error.

    Args:
      corpus: a corpus file (see `iter_passages`), or passages.
      out: path of the new folder; it must not exist.
      kind: scann, exact or bm25.
      text_encoder: required for scann and exact. If its `titles` is False, the manifest records `title_weight` 0.
      bm25: settings of BM25.
      options: how the corpus is read, and limits of the build.
      progress: called after each thousand passages read, each block, each embedded batch and each part of a ScaNN index.

    Returns the manifest without its entries "format", "versions" and "files".

    Raises:
      UserError: unknown kind, empty or broken corpus, missing encoder, full disk, or a folder that exists, cannot be made, is
        damaged or is deleted meanwhile.
    """
    check_kind(kind, text_encoder)
    out, bm25, options = Path(out), bm25 or Bm25Config(), options or BuildOptions()
    if out.exists():
        raise UserError(f"index folder {out}: already exists. Remove it, or give the path of a new folder.")
    unfinished = out.with_name(out.name + ".unfinished")
    settings = _settings(kind, text_encoder, bm25, options)
    with explain_disk_full(unfinished), explain_deleted_folder(unfinished):
        make_unfinished_folder(unfinished, out)
        with exclusive_lock(
            unfinished, f"index {unfinished}: another process is building it. Wait until it ends, or stop it."
        ):
            check_settings(unfinished, settings)
            manifest = settings | write_corpus(unfinished, corpus, options, progress)
            passages = PassageFile(unfinished, manifest["passages"])
            if kind == "bm25":
                _build_bm25(unfinished, passages, bm25, options.block, progress)
            else:
                assert text_encoder is not None
                manifest |= _build_dense(unfinished, passages, kind, text_encoder, options, progress)
            write_manifest(unfinished, manifest, STATE_FILES)
        unfinished.rename(out)
    # Delete these last: if the build is killed before the rename, the next build reads them and repeats no work.
    for name in STATE_FILES:
        (out / name).unlink(missing_ok=True)
    return manifest


def check_kind(kind: str, text_encoder: "TextEncoder | None") -> None:
    """Raise UserError for an unknown kind of index, or if its encoder is missing."""
    if kind not in KINDS:
        raise UserError(f"retriever kind: got {kind!r}; allowed are {', '.join(KINDS)}.")
    if kind != "bm25" and text_encoder is None:
        raise UserError(
            f"encoder: missing; a {kind} index needs one. Give an encoder folder, or use kind 'bm25'."
        )


def _settings(
    kind: str, text_encoder: "TextEncoder | None", bm25: Bm25Config, options: BuildOptions
) -> dict[str, Any]:
    """Return the settings that a continued build must share; they are entries of the manifest."""
    settings: dict[str, Any] = {"kind": kind, "block": options.block, "shard": list(options.shard)}
    if kind == "bm25":
        return settings | {"bm25": dataclasses.asdict(bm25), "analysis": ANALYSIS_VERSION}
    assert text_encoder is not None
    settings["encoder"] = {"name": text_encoder.name, "fingerprint": text_encoder.fingerprint}
    return settings if text_encoder.titles else settings | {"title_weight": 0}


def _build_bm25(
    unfinished: Path, passages: PassageFile, config: Bm25Config, block: int, progress: Progress
) -> None:
    """Count the words of the passages block by block, and write the BM25 index from the counts."""
    postings = PostingsFolder(unfinished / "words")
    progress("count words", postings.passages_counted, len(passages))
    while postings.passages_counted < len(passages):
        start = postings.passages_counted
        postings.add([config.analyse_passage(passage) for passage in passages[start : start + block]])
        progress("count words", postings.passages_counted, len(passages))
    Bm25Index.build_folder(postings, unfinished / "bm25", config)
    shutil.rmtree(unfinished / "words")


def _build_dense(
    unfinished: Path,
    passages: PassageFile,
    kind: str,
    text_encoder: "TextEncoder",
    options: BuildOptions,
    progress: Progress,
) -> dict[str, Any]:
    """Embed the passages, and build a ScaNN index for kind "scann"; return their entries of the manifest."""
    embeddings, truncated = write_embeddings(unfinished, passages, text_encoder, options.block, progress)
    entries = {"metric": "inner_product", "dim": text_encoder.dim, "cut": truncated}
    if kind == "scann":
        entries["scann"] = build_scann(
            unfinished, passages, embeddings, text_encoder, options.memory_gb, progress
        )
    return entries
