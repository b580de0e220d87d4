"""Build an index folder as a stream: memory stays constant, and a killed build can be continued. Read `build_index` first.

Until the index is complete, its folder is named OUT.unfinished. After a kill, the corpus is read again from the start. The slow
stages (embedding, counting words, ScaNN) continue after their last complete block or part.
"""

import contextlib
import dataclasses
import errno
import itertools
import json
import math
import shutil
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rrl.data.passages import Passage, iter_passages
from rrl.data.records import OnError
from rrl.errors import UserError
from rrl.files import DISK_FULL, LOCK, atomic_stream, exclusive_lock
from rrl.retrieval.bm25 import ANALYSIS_VERSION, Bm25Config, Bm25Index
from rrl.retrieval.dense import ExactIndex, ScannIndex
from rrl.retrieval.disk_space import disk_full_error
from rrl.retrieval.folder import KINDS, PassageFile, write_manifest, write_passages
from rrl.retrieval.postings import PostingsFolder
from rrl.retrieval.ranking import ranking_recall
from rrl.retrieval.sizing import ScannConfig, choose_scann
from rrl.retrieval.vectors import VectorFile

if TYPE_CHECKING:  # BM25 needs no JAX, so building it does not import any.
    from rrl.retrieval.encode import TextEncoder

BLOCK = 8192
"""Passages that are written together. A kill loses at most one block of work."""

SAVE_SECONDS = 60.0
"""Seconds between two saves of the embeddings of an incomplete block."""

PARTIAL_BLOCK = "begun.npz"
STATE_FILES = ("wanted.json", "corpus.json", "cut.txt", PARTIAL_BLOCK, LOCK)
"""Files of an unfinished folder that record its progress and lock it."""

RECALL_QUERIES = 400
"""Number of queries on which ScaNN's recall is measured."""

TARGET_RECALL = 0.99
"""The search is widened until recall@5 on `RECALL_QUERIES` queries reaches this."""

MAX_REORDER = 5000
"""Largest number of candidates to rescore."""

Progress = Callable[[str, int, int], None]
"""Progress callback: (stage, passages done, total passages). The total is 0 while it is unknown."""


def build_index(
    corpus: str | Path | Iterable[Passage],
    out: str | Path,
    kind: str = "scann",
    text_encoder: "TextEncoder | None" = None,
    bm25: Bm25Config | None = None,
    *,
    memory_gb: float | None = None,
    block: int = BLOCK,
    on_error: OnError = "refuse",
    columns: Sequence[str] = (),
    shard: tuple[int, int] = (0, 1),
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Write an index folder and return its manifest. The folder gets its final name only when it is complete.

    The same call continues a killed build. Other settings for the same unfinished folder raise an error.

    Args:
      corpus: a corpus file (see `iter_passages`), or passages.
      out: path of the new folder; it must not exist.
      kind: scann, exact or bm25.
      text_encoder: required for scann and exact. If its `titles` is False, the manifest records `title_weight` 0.
      bm25: settings of BM25.
      memory_gb: memory for ScaNN, in 10^9 bytes; None: most of the machine's.
      block: passages that are written together; a kill loses at most one block of work.
      on_error: how to handle a broken record of the corpus file.
      columns: the meaning of each column of a corpus in a table (see `iter_passages`).
      shard: (i, n) indexes every n-th passage from the i-th (counted from 0), for a corpus spread over n hosts.
      progress: called after each block and each embedded batch.

    Raises:
      UserError: unknown kind, empty or broken corpus, missing encoder, full disk, or a folder that exists, cannot be made, is
        damaged or is deleted meanwhile.
    """
    check_kind(kind, text_encoder)
    out = Path(out)
    if out.exists():
        raise UserError(f"index folder {out}: already exists. Remove it, or give the path of a new folder.")
    unfinished = out.with_name(out.name + ".unfinished")
    bm25 = bm25 or Bm25Config()
    if not 0 <= shard[0] < shard[1]:
        raise UserError(f"shard={shard[0]}/{shard[1]} must be one of 0/n to (n-1)/n, such as 0/4")
    settings: dict[str, Any] = {"kind": kind, "block": block, "shard": list(shard)}
    if kind == "bm25":
        settings |= {"bm25": dataclasses.asdict(bm25), "analysis": ANALYSIS_VERSION}
    else:
        assert text_encoder is not None
        settings["encoder"] = {"name": text_encoder.name, "fingerprint": text_encoder.fingerprint}
        if not text_encoder.titles:
            settings["title_weight"] = 0
    with disk_full_error(unfinished), _explain_deleted_folder(unfinished):
        try:
            unfinished.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            raise UserError(f"index folder {out}: cannot be created ({error}). Give another path.") from error
        with exclusive_lock(
            unfinished, f"index {unfinished}: another process is building it. Wait until it ends, or stop it."
        ):
            _check_settings(unfinished, settings)
            corpus_entries = _write_corpus(unfinished, corpus, on_error, columns, shard, progress)
            count = corpus_entries["passages"]
            manifest = {**settings, **corpus_entries}
            passages = PassageFile(unfinished, count)
            if kind == "bm25":
                _count_words(unfinished, passages, bm25, block, progress)
            else:
                assert text_encoder is not None
                manifest |= {"metric": "inner_product", "dim": text_encoder.dim}
                embeddings, manifest["cut"] = _embed(unfinished, passages, text_encoder, block, progress)
                if kind == "scann":
                    manifest["scann"] = _scann(
                        unfinished, passages, embeddings, text_encoder, memory_gb, progress
                    )
            write_manifest(unfinished, manifest, STATE_FILES)
        unfinished.rename(out)
    # Delete these last: if the build is killed before the rename, the next build reads them and repeats no work.
    for name in STATE_FILES:
        (out / name).unlink(missing_ok=True)
    return manifest


@contextlib.contextmanager
def _explain_deleted_folder(unfinished: Path) -> Iterator[None]:
    """Raise a clear UserError if the folder is deleted or renamed while it is written."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOENT or unfinished.is_dir():
            raise
        raise UserError(
            f"index {unfinished}: the folder was deleted or renamed during the build. Put it back, or run the same command "
            "again to start over."
        ) from error


def check_kind(kind: str, text_encoder: "TextEncoder | None") -> None:
    """Raise UserError for an unknown kind of index, or if its encoder is missing."""
    if kind not in KINDS:
        raise UserError(f"retriever kind: got {kind!r}; allowed are {', '.join(KINDS)}.")
    if kind != "bm25" and text_encoder is None:
        raise UserError(
            f"encoder: missing; a {kind} index needs one. Give an encoder folder, or use kind 'bm25'."
        )


def _check_settings(unfinished: Path, settings: dict[str, Any]) -> None:
    """Raise UserError if the unfinished folder was begun with other settings; otherwise save the settings."""
    file = unfinished / "wanted.json"
    if saved := _read_state(file):
        different = [name for name in saved.keys() | settings.keys() if saved.get(name) != settings.get(name)]
        if different:
            named = "; ".join(f"{n}: {saved.get(n)} there, {settings.get(n)} now" for n in sorted(different))
            raise UserError(
                f"index {unfinished}: an unfinished build with other settings ({named}). Give the same settings to continue "
                "it, or remove that folder."
            )
    with atomic_stream(file) as stream:
        stream.write(json.dumps(settings).encode())


def _read_state(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of an unfinished build, {} if it is missing. Raises UserError if it is damaged."""
    if not file.is_file():
        return {}
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise TypeError(f"{state!r:.40} is not a JSON object")
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"index {file.parent}: damaged, {file.name} cannot be read ({error}). Remove that folder and build again."
        ) from error
    return state


def _write_corpus(
    unfinished: Path,
    corpus: str | Path | Iterable[Passage],
    on_error: OnError,
    columns: Sequence[str],
    shard: tuple[int, int],
    progress: Progress,
) -> dict[str, Any]:
    """Write the passages into the folder, and remove files there that were made from another corpus.

    Returns the corpus's entries of the manifest: number and fingerprint of the passages, the number of records skipped as broken,
    and the number left out as empty.
    """
    file = unfinished / "corpus.json"
    state = _read_state(file)
    stored = state.get("read", {"corpus": ""})
    source, skipped, left_out = None, list[str](), list[str]()
    if isinstance(corpus, str | Path):
        path = Path(corpus)
        if path.is_file():
            source = [path.name, path.stat().st_size, path.stat().st_mtime_ns, *columns]
        unchanged = "skipped" in stored and source and state["source"] == source
        if unchanged and (on_error == "skip" or not stored["skipped"]):
            return stored
        corpus = iter_passages(path, on_error, skipped, left_out, columns)
    count, fingerprint = write_passages(
        unfinished, _report_reading(itertools.islice(corpus, shard[0], None, shard[1]), progress)
    )
    if not count:
        of_shard = f" for shard {shard[0]}/{shard[1]}" if shard[1] > 1 else ""
        raise UserError(
            f"corpus: it has no passages{of_shard}; an index needs at least one. Check the corpus file."
        )
    if stored["corpus"] != fingerprint:
        for name in ("embeddings.npy", "cut.txt"):
            (unfinished / name).unlink(missing_ok=True)
        for name in ("words", "bm25", "scann"):
            shutil.rmtree(unfinished / name, ignore_errors=True)
    entries = {"passages": count, "corpus": fingerprint, "skipped": len(skipped), "left_out": len(left_out)}
    with atomic_stream(file) as stream:
        stream.write(json.dumps({"source": source, "read": entries}).encode())
    return entries


def _report_reading(passages: Iterable[Passage], progress: Progress) -> Iterator[Passage]:
    for number, passage in enumerate(passages, 1):
        yield passage
        if number % 1000 == 0:
            progress("read", number, 0)


def _count_words(
    unfinished: Path, passages: PassageFile, config: Bm25Config, block: int, progress: Progress
) -> None:
    counted = PostingsFolder(unfinished / "words")
    progress("count words", counted.passages_counted, len(passages))
    while counted.passages_counted < len(passages):
        counted.add(
            [
                config.analyse_passage(p)
                for p in passages[counted.passages_counted : counted.passages_counted + block]
            ]
        )
        progress("count words", counted.passages_counted, len(passages))
    Bm25Index.build_folder(counted, unfinished / "bm25", config)
    shutil.rmtree(unfinished / "words")


def _embed(
    unfinished: Path, passages: PassageFile, text_encoder: "TextEncoder", block: int, progress: Progress
) -> tuple[np.ndarray, int]:
    """Return the embeddings, memory-mapped, and the number of passages that were truncated.

    A passage is truncated if it has more tokens than the encoder takes. `cut.txt` has a line per block: its number of truncated
    passages.
    """
    file, cut_file = (
        VectorFile(unfinished / "embeddings.npy", len(passages), text_encoder.dim, block),
        unfinished / "cut.txt",
    )
    cut_counts = (
        cut_file.read_text(errors="replace").split()[: -(-file.rows // block)] if cut_file.is_file() else []
    )
    if len(cut_counts) * block < file.rows or not all(line.isdecimal() for line in cut_counts):
        raise UserError(
            f"index {unfinished}: damaged, cut.txt lacks the number for a block. Remove that folder and build again."
        )
    cut_file.write_text("".join(f"{line}\n" for line in cut_counts))

    def report(done: int) -> None:
        progress("embed", file.rows + done, len(passages))

    report(0)
    starts = range(file.rows, len(passages), block)
    with ThreadPoolExecutor(1) as pool:
        # The next block is read and tokenised while the device works on this one.
        ahead = [pool.submit(_tokenize_block, passages, text_encoder, start, block) for start in starts[:1]]
        for start in starts:
            ids, cut = ahead.pop().result()
            if start + block < len(passages):
                ahead.append(pool.submit(_tokenize_block, passages, text_encoder, start + block, block))
            vectors = _embed_block(unfinished / PARTIAL_BLOCK, start, ids, text_encoder, report)
            with cut_file.open("a") as stream:
                stream.write(f"{cut}\n")
            file.append(vectors)
            (unfinished / PARTIAL_BLOCK).unlink(missing_ok=True)
            report(0)
    cut = sum(map(int, cut_file.read_text().split()))
    return np.load(unfinished / "embeddings.npy", mmap_mode="r"), cut


def _embed_block(
    partial: Path,
    start: int,
    ids: list[list[int]],
    text_encoder: "TextEncoder",
    report: Callable[[int], None],
) -> np.ndarray:
    """Return the embeddings of the block that begins with passage `start`.

    Embeddings that a killed build saved in the file `partial` are reused. The other passages form the same batches as before, so
    the result is bitwise that of a build that was not killed.
    """
    vectors = np.empty((len(ids), text_encoder.dim), np.float32)
    done = np.zeros(len(ids), bool)
    if (partial_block := _load_partial(partial, start, vectors.shape)) is not None:
        saved_rows, saved_vectors = partial_block
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


def _load_partial(file: Path, start: int, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray] | None:
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


def _tokenize_block(
    passages: PassageFile, text_encoder: "TextEncoder", start: int, block: int
) -> tuple[list, int]:
    return text_encoder.tokenize_passages(passages[start : start + block])


def _scann(
    unfinished: Path,
    passages: PassageFile,
    embeddings: np.ndarray,
    text_encoder: "TextEncoder",
    memory_gb: float | None,
    progress: Progress,
) -> dict[str, Any]:
    """Build and tune the ScaNN index; return its settings and their measured recall and speed, for the manifest."""
    count, dim = embeddings.shape
    began, config = time.monotonic(), choose_scann(count, dim, memory_gb)
    file, config_json = unfinished / "scann" / "config.json", json.dumps(dataclasses.asdict(config)).encode()
    if not file.is_file() or file.read_bytes() != config_json:
        # An earlier build with another memory limit chose other settings.
        shutil.rmtree(file.parent, ignore_errors=True)
        file.parent.mkdir()
        with atomic_stream(file) as stream:
            stream.write(config_json)
    progress("ScaNN", 0, count)
    for done in ScannIndex.build_folder(file.parent, embeddings, config):
        progress("ScaNN", done, count)
    seconds = time.monotonic() - began
    queries = sample_queries(passages)
    index, measured = tune_recall(
        ScannIndex.load(file.parent, embeddings, config), text_encoder.embed_queries(queries)
    )
    return dataclasses.asdict(index.config) | {"measured": measured | {"build_seconds": round(seconds, 1)}}


def sample_queries(passages: PassageFile, count: int = RECALL_QUERIES) -> list[str]:
    """Return plausible queries: the titles of random passages, or the first words of those without a title."""
    rows = np.random.default_rng(0).choice(len(passages), min(count, len(passages)), replace=False)
    return [p.title or " ".join(p.text.split()[:12]) for p in (passages[int(row)] for row in rows)]


def tune_recall(index: ScannIndex, vectors: np.ndarray, k: int = 5) -> tuple[ScannIndex, dict[str, Any]]:
    """Widen the search until its recall against exact search reaches `TARGET_RECALL` on these queries.

    Each round tries more leaves and more candidates, and takes the change that raises recall more.

    Returns the index with the new settings, and its recall and queries per second.
    """
    texts = [""] * len(vectors)
    exact, _ = ExactIndex(index.embeddings).search(texts, k, vectors)

    def recall(config: ScannConfig) -> float:
        index.config = config
        return ranking_recall(index.search(texts, k, vectors)[0], exact)

    config = index.config
    reached = recall(config)
    while reached < TARGET_RECALL and (wider := _wider_configs(config)):
        reached, config = max(((recall(other), other) for other in wider), key=lambda pair: pair[0])
    index.config = config
    began = time.monotonic()
    index.search(texts, k, vectors)
    seconds = time.monotonic() - began
    rate = round(len(vectors) / max(seconds, 1e-9), 1)
    return index, {"recall": round(reached, 4), "k": k, "queries": len(vectors), "queries_per_second": rate}


def _wider_configs(config: ScannConfig) -> list[ScannConfig]:
    """Return the configs that search more leaves, or rescore more candidates."""
    options = []
    if config.leaves_to_search < config.leaves:
        more = min(config.leaves, math.ceil(1.25 * config.leaves_to_search))
        options.append(dataclasses.replace(config, leaves_to_search=more))
    if config.leaves and config.reorder < MAX_REORDER:
        options.append(dataclasses.replace(config, reorder=2 * config.reorder))
    return options
