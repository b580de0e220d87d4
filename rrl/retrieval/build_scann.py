"""Build the ScaNN index of an unfinished folder, and tune its search to a target recall."""

import dataclasses
import json
import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from rrl.files import atomic_stream
from rrl.retrieval.build_state import Progress
from rrl.retrieval.dense import ExactIndex, ScannIndex
from rrl.retrieval.folder import PassageFile
from rrl.retrieval.ranking import ranking_recall
from rrl.retrieval.sizing import ScannConfig, choose_scann

if TYPE_CHECKING:
    from rrl.retrieval.encode import TextEncoder

RECALL_QUERIES = 400
"""Number of queries on which ScaNN's recall is measured."""

TARGET_RECALL = 0.99
"""`tune_recall` widens the search until recall@5 reaches this."""

MAX_REORDER = 5000
"""`tune_recall` no longer doubles `ScannConfig.reorder` once it has reached this."""


def build_scann(
    unfinished: Path,
    passages: PassageFile,
    embeddings: Float[np.ndarray, "N E"],
    text_encoder: "TextEncoder",
    memory_gb: float | None,
    progress: Progress,
) -> dict[str, Any]:
    """Build and tune the ScaNN index; return its settings and their measured recall and speed, for the manifest."""
    count, dim = embeddings.shape
    folder, config = unfinished / "scann", choose_scann(count, dim, memory_gb)
    started = time.monotonic()
    _discard_other_config(folder, config)
    progress("ScaNN", 0, count)
    for done in ScannIndex.build_folder(folder, embeddings, config):
        progress("ScaNN", done, count)
    build_seconds = round(time.monotonic() - started, 1)
    queries = text_encoder.embed_queries(sample_queries(passages))
    index, measured = tune_recall(ScannIndex.load(folder, embeddings, config), queries)
    return dataclasses.asdict(index.config) | {"measured": measured | {"build_seconds": build_seconds}}


def _discard_other_config(folder: Path, config: ScannConfig) -> None:
    """Empty the folder if an earlier build with another memory limit chose other settings, and save the settings there."""
    file, config_json = folder / "config.json", json.dumps(dataclasses.asdict(config)).encode()
    if file.is_file() and file.read_bytes() == config_json:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with atomic_stream(file) as stream:
        stream.write(config_json)


def sample_queries(passages: PassageFile, count: int = RECALL_QUERIES) -> list[str]:
    """Return plausible queries: the titles of random passages, or the first words of those without a title."""
    rows = np.random.default_rng(0).choice(len(passages), min(count, len(passages)), replace=False)
    return [p.title or " ".join(p.text.split()[:12]) for p in (passages[int(row)] for row in rows)]


def tune_recall(
    index: ScannIndex, vectors: Float[np.ndarray, "Q E"], k: int = 5
) -> tuple[ScannIndex, dict[str, Any]]:
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
