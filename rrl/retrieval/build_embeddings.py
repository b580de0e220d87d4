"""Embed the passages of an unfinished index folder block by block. Read `write_embeddings` first.

A killed build continues after its last complete block, and within a block after its last saved batch.
"""

import math
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from rrl.errors import UserError
from rrl.files import atomic_stream
from rrl.retrieval.build_state import PARTIAL_BLOCK, TRUNCATED_COUNTS, Progress
from rrl.retrieval.folder import PassageFile
from rrl.retrieval.vectors import VectorFile

if TYPE_CHECKING:
    from rrl.retrieval.encode import TextEncoder

SAVE_SECONDS = 60.0
"""Seconds between two saves of the embeddings of an incomplete block."""


def write_embeddings(
    unfinished: Path, passages: PassageFile, text_encoder: "TextEncoder", block: int, progress: Progress
) -> tuple[Float[np.ndarray, "N E"], int]:
    """Embed the passages that are not embedded yet; write embeddings.npy.

    Returns all embeddings, memory-mapped, and the number of passages that were truncated because they have more than
    `passage_tokens` tokens.
    """
    vectors_file = VectorFile(unfinished / "embeddings.npy", len(passages), text_encoder.dim, block)
    truncated_counts, partial = unfinished / TRUNCATED_COUNTS, unfinished / PARTIAL_BLOCK
    first_missing = vectors_file.rows  # an earlier build wrote the rows before it
    _drop_counts_of_later_blocks(truncated_counts, first_missing, block)

    def report(rows_of_block: int) -> None:
        """Report the passages of complete blocks, plus this many of the next block."""
        progress("embed", vectors_file.rows + rows_of_block, len(passages))

    def tokenize(start: int) -> tuple[list[list[int]], int]:
        return text_encoder.tokenize_passages(passages[start : start + block])

    report(0)
    starts = range(first_missing, len(passages), block)
    with ThreadPoolExecutor(1) as pool:
        # The next block is read and tokenised while the device works on this one.
        tokenized = pool.submit(tokenize, starts[0]) if starts else None
        for start in starts:
            assert tokenized is not None
            ids, truncated = tokenized.result()
            if start + block < len(passages):
                tokenized = pool.submit(tokenize, start + block)
            vectors = _embed_block(partial, start, ids, text_encoder, report)
            with truncated_counts.open("a") as stream:
                stream.write(f"{truncated}\n")
            vectors_file.append(vectors)
            partial.unlink(missing_ok=True)
            report(0)
    truncated = sum(map(int, truncated_counts.read_text().split()))
    return np.load(unfinished / "embeddings.npy", mmap_mode="r"), truncated


def _drop_counts_of_later_blocks(file: Path, rows: int, block: int) -> None:
    """Remove the lines of `TRUNCATED_COUNTS` for blocks beyond the first `rows` embeddings.

    There is such a line if a build was killed after it wrote a block's count and before it wrote the block's embeddings.

    Raises UserError if the line of an embedded block is missing or not a number.
    """
    blocks = math.ceil(rows / block)
    counts = file.read_text(errors="replace").split()[:blocks] if file.is_file() else []
    if len(counts) < blocks or not all(count.isdecimal() for count in counts):
        raise UserError(
            f"index {file.parent}: damaged, {file.name} lacks a block's number of truncated passages. "
            "Remove that folder and build again."
        )
    file.write_text("".join(f"{count}\n" for count in counts))


def _embed_block(
    partial: Path,
    start: int,
    ids: list[list[int]],
    text_encoder: "TextEncoder",
    report: Callable[[int], None],
) -> Float[np.ndarray, "n E"]:
    """Return the embeddings of the block that begins with passage `start`.

    Embeddings that a killed build saved in the file `partial` are reused. The other passages form the same batches as they would
    have in that build, so the result is bitwise that of a build that was not killed. `report` receives the number of embedded
    passages of the block after each batch but the last.
    """
    vectors = np.empty((len(ids), text_encoder.dim), np.float32)
    done = np.zeros(len(ids), bool)
    if (saved := _load_partial(partial, start, vectors.shape)) is not None:
        saved_rows, saved_vectors = saved
        done[saved_rows], vectors[saved_rows] = True, saved_vectors
    missing, last_save = np.flatnonzero(~done), time.monotonic()

    def on_batch(rows: np.ndarray, embeddings: np.ndarray) -> None:
        nonlocal last_save
        done[missing[rows]], vectors[missing[rows]] = True, embeddings
        if done.all():
            return
        report(int(done.sum()))
        if time.monotonic() - last_save >= SAVE_SECONDS:
            with atomic_stream(partial) as stream:
                np.savez(stream, start=start, rows=np.flatnonzero(done), vectors=vectors[done])
            last_save = time.monotonic()

    text_encoder.embed_tokens([ids[row] for row in missing], on_batch=on_batch)
    return vectors


def _load_partial(
    file: Path, start: int, shape: tuple[int, int]
) -> tuple[Int[np.ndarray, "n"], Float[np.ndarray, "n E"]] | None:
    """Return the rows and vectors of this block that a killed build saved, or None if it saved none."""
    try:
        with np.load(file) as saved:
            rows, vectors = saved["rows"], saved["vectors"]
            fits = (
                saved["start"] == start and rows.max() < shape[0] and vectors.shape == (len(rows), shape[1])
            )
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None
    return (rows, vectors) if fits else None
