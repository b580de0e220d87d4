"""Read a corpus into an unfinished index folder."""

import itertools
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rrl.data.passages import Passage, iter_passages
from rrl.errors import UserError
from rrl.files import atomic_stream
from rrl.retrieval.build_state import (
    CORPUS_STATE,
    PARTIAL_BLOCK,
    TRUNCATED_COUNTS,
    BuildOptions,
    Progress,
    read_state,
)
from rrl.retrieval.folder import write_passages


def write_corpus(
    unfinished: Path, corpus: str | Path | Iterable[Passage], options: BuildOptions, progress: Progress
) -> dict[str, Any]:
    """Write the passages into the folder, and remove files there that were made from another corpus.

    If a killed build has already read the same corpus file, it is not read again.

    Returns the corpus's entries of the manifest: number and fingerprint of the passages ("passages", "corpus"), number of broken
    records ("skipped"), and number of documents with neither title nor text ("left_out").
    """
    state = read_state(unfinished / CORPUS_STATE)
    previous = state.get("read", {"corpus": ""})
    source, skipped, empty = None, list[str](), list[str]()
    if isinstance(corpus, str | Path):
        path = Path(corpus)
        if path.is_file():
            source = [path.name, path.stat().st_size, path.stat().st_mtime_ns, *options.columns]
        # Builds of older versions of rrl did not record "skipped". Their corpus is read again.
        unchanged = source is not None and state.get("source") == source and "skipped" in previous
        # With on_error="refuse", a corpus with broken records must be read again, so that the error is raised.
        if unchanged and (options.on_error == "skip" or not previous["skipped"]):
            return previous
        corpus = iter_passages(path, options.on_error, skipped, empty, options.columns)
    shard_index, shard_count = options.shard
    of_shard = itertools.islice(corpus, shard_index, None, shard_count)
    count, fingerprint = write_passages(unfinished, _report_reading(of_shard, progress))
    if not count:
        shard = f" for shard {shard_index}/{shard_count}" if shard_count > 1 else ""
        raise UserError(
            f"corpus: it has no passages{shard}; an index needs at least one. Check the corpus file."
        )
    if previous["corpus"] != fingerprint:
        _remove_derived_files(unfinished)
    entries = {"passages": count, "corpus": fingerprint, "skipped": len(skipped), "left_out": len(empty)}
    with atomic_stream(unfinished / CORPUS_STATE) as stream:
        stream.write(json.dumps({"source": source, "read": entries}).encode())
    return entries


def _remove_derived_files(unfinished: Path) -> None:
    """Remove the files that later stages made from the passages."""
    for name in ("embeddings.npy", TRUNCATED_COUNTS, PARTIAL_BLOCK):
        (unfinished / name).unlink(missing_ok=True)
    for name in ("words", "bm25", "scann"):
        shutil.rmtree(unfinished / name, ignore_errors=True)


def _report_reading(passages: Iterable[Passage], progress: Progress) -> Iterator[Passage]:
    """Yield the passages, and report their number so far after each thousand."""
    for number, passage in enumerate(passages, 1):
        yield passage
        if number % 1000 == 0:
            progress("read", number, 0)
