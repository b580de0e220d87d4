"""Make a retriever in memory, or open one from an index folder after checking it."""

import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rrl.data.passages import Passage, fingerprint
from rrl.errors import UserError
from rrl.files import wait_for_lock
from rrl.retrieval.bm25 import Bm25Config, Bm25Index
from rrl.retrieval.build import build_index, check_kind
from rrl.retrieval.dense import ExactIndex, ScannIndex
from rrl.retrieval.folder import PassageFile, damaged_error, read_manifest
from rrl.retrieval.retriever import Index, Retriever, RetryPolicy
from rrl.retrieval.sizing import BRUTE_FORCE_BELOW, ScannConfig

if TYPE_CHECKING:  # Importing it imports JAX, which BM25 does not need.
    from rrl.retrieval.encode import TextEncoder


def make_retriever(
    passages: Sequence[Passage],
    kind: str = "scann",
    text_encoder: "TextEncoder | None" = None,
    bm25: Bm25Config | None = None,
) -> Retriever:
    """Return a retriever over passages in memory. Raises UserError for an unknown kind, no passages or a missing encoder."""
    check_kind(kind, text_encoder)
    if not len(passages):
        raise UserError("corpus: it has no passages; an index needs at least one. Check the corpus file.")
    index: Index
    if kind == "bm25":
        index = Bm25Index.build(passages, bm25)
    else:
        assert text_encoder is not None
        embeddings = text_encoder.embed_passages(passages)
        index = ScannIndex.build(embeddings) if kind == "scann" else ExactIndex(embeddings)
    return Retriever(passages, index, text_encoder)


def stored_retriever(
    passages: Sequence[Passage],
    kind: str,
    text_encoder: "TextEncoder | None",
    folder: Path,
    bm25: Bm25Config | None = None,
) -> Retriever:
    """Return a retriever whose index is stored in `folder`, so that every process with that folder gets the same results.

    ScaNN's builder draws its training sample without a seed, so a rebuilt tree returns other passages for a few queries in a
    hundred. An index over the embeddings of `BRUTE_FORCE_BELOW` passages or more is therefore built once, as `folder`/KEY, and
    opened from then on. KEY is a hash of `kind`, the corpus, the encoder and whether titles are embedded. A killed build is
    continued, a second process waits for the first, and a damaged index is rebuilt with a warning.

    For fewer passages, and for BM25, this is `make_retriever`, which always makes the same index. Raises UserError as
    `make_retriever` and `build_index` do.
    """
    if kind == "bm25" or len(passages) < BRUTE_FORCE_BELOW:
        return make_retriever(passages, kind, text_encoder, bm25)
    check_kind(kind, text_encoder)
    assert text_encoder is not None
    parts = [
        kind,
        fingerprint(passages),
        text_encoder.fingerprint,
        *([] if text_encoder.titles else ["text"]),  # "text": passages are embedded without their titles
    ]
    key = hashlib.sha256(" ".join(parts).encode()).hexdigest()
    index_folder = folder / key[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(folder):
        if os.path.lexists(index_folder):
            try:
                return open_index(index_folder, text_encoder)
            except UserError as error:
                logging.getLogger(__name__).warning(
                    "%s It is built again; a resumed run may find other passages for a few queries in a hundred.",
                    error,
                )
                if index_folder.is_dir() and not index_folder.is_symlink():
                    shutil.rmtree(index_folder)
                else:
                    index_folder.unlink()
        elif any(folder.parent.glob("checkpoints/[0-9]*")):
            # `folder` is in a workdir with checkpoints: this run is resumed, so an earlier process built an index.
            logging.getLogger(__name__).warning(
                "%s is missing: it was removed, or an older version of rrl named it differently. It is built again; a "
                "resumed run may find other passages for a few queries in a hundred.",
                index_folder,
            )
        build_index(passages, index_folder, kind, text_encoder)
        return open_index(index_folder, text_encoder)


def open_index(
    folder: str | Path, text_encoder: "TextEncoder | None" = None, retry_policy: RetryPolicy | None = None
) -> Retriever:
    """Open an index folder. Passages are read on demand, and embeddings are memory-mapped.

    Raises UserError if the folder is not an index, is unfinished or damaged, or if `text_encoder` is not the encoder that it was
    built with (None for BM25).
    """
    folder = Path(folder)
    try:
        return _open_checked(folder, text_encoder, retry_policy)
    except UserError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise damaged_error(folder, f"it cannot be opened ({error!r})") from error


def _open_checked(
    folder: Path, text_encoder: "TextEncoder | None", retry_policy: RetryPolicy | None
) -> Retriever:
    manifest = read_manifest(folder)
    index: Index
    if manifest["kind"] == "bm25":
        if text_encoder is not None:
            raise UserError(
                f"index {folder}: a bm25 index searches words and takes no encoder; got {text_encoder.name!r}. Leave it out."
            )
        index = Bm25Index.load(folder / "bm25")
    else:
        _check_encoder(folder, manifest, text_encoder)
        embeddings = np.load(folder / "embeddings.npy", mmap_mode="r")
        if embeddings.shape != (manifest["passages"], manifest["dim"]):
            raise damaged_error(folder, f"embeddings.npy has shape {embeddings.shape}")
        if manifest["kind"] == "scann":
            settings = {name: value for name, value in manifest["scann"].items() if name != "measured"}
            index = ScannIndex.load(folder / "scann", embeddings, ScannConfig(**settings))
        else:
            index = ExactIndex(embeddings)
    return Retriever(
        PassageFile(folder, manifest["passages"]), index, text_encoder, retry_policy=retry_policy
    )


def open_with_encoder(index: str | Path, encoder: str | Path | None) -> Retriever:
    """Open an index folder, with the encoder of the folder `encoder` unless that is None or empty."""
    if not encoder:
        return open_index(index)
    from rrl.retrieval.encoder_folder import load_text_encoder

    return open_index(index, load_text_encoder(encoder))


def _check_encoder(folder: Path, manifest: dict[str, Any], text_encoder: "TextEncoder | None") -> None:
    recorded = manifest["encoder"]
    if text_encoder is None:
        raise UserError(
            f"index {folder}: needs the encoder it was built with, {recorded['name']!r}. Give its folder."
        )
    if text_encoder.fingerprint != recorded["fingerprint"]:
        raise UserError(
            f"index {folder}: built with the encoder {recorded['name']!r} ({recorded['fingerprint'][:12]}), got "
            f"{text_encoder.name!r} ({text_encoder.fingerprint[:12]}). Give that encoder, or build the index again."
        )
