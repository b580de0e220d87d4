"""The retriever of a run: its settings, its encoder, and its index.

The run builds the index, opens an index folder, or sends its queries to a search service.

Read `load_retriever` first.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rrl.data.passages import Passage
from rrl.errors import UserError, one_of
from rrl.models.weights import require_folder
from rrl.retrieval.bm25 import Bm25Config
from rrl.retrieval.encode import TextEncoder
from rrl.retrieval.encoder_folder import load_text_encoder
from rrl.retrieval.folder import KINDS as INDEXES
from rrl.retrieval.folder import index_identity
from rrl.retrieval.index import make_retriever, open_index, stored_retriever
from rrl.retrieval.remote import open_remote
from rrl.retrieval.retriever import Retriever, RetryPolicy, SearchFailed
from rrl.retrieval.wire import FORMS

SEARCH_ATTEMPTS = 3
"""Attempts per search on a search service, the first included."""

INDEXES_FOLDER = "indexes"
"""Folder of a workdir with the indexes that the run built (see `stored_retriever`)."""


@dataclasses.dataclass(frozen=True)
class RetrieverConfig:
    """The retriever of a run."""

    kind: str = "scann"
    """scann, exact or bm25; or off, with which every search returns nothing."""
    encoder: str = ""
    """Folder of the text encoder, for scann and exact."""
    title_weight: int = 3
    """BM25 counts each word of the title this many times. 0 leaves titles out of BM25 and of the embedded text. Embeddings do not
    distinguish values above 0."""
    k1: float = 0.9
    """BM25's term-frequency saturation."""
    b: float = 0.4
    """BM25's length normalisation, in 0..1."""
    index: str = ""
    """An index folder, or the http://… address of a search service. If it is given, the run builds no index, and `kind` has no
    effect, except that off still turns the search off."""
    form: str = "search-r1"
    """Request format of a search service: search-r1, flashrag or r1-searcher."""

    def __post_init__(self) -> None:
        one_of((*INDEXES, "off"), self, "kind")
        one_of(FORMS, self, "form")
        self.bm25()  # checks its settings

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine search results, with an index identified by its content.

        `index` and `form` appear only if an index is given. A service is identified by its address and form alone.

        Raises:
            UserError: the index is broken, or the encoder would not be used.
        """
        settings = dataclasses.asdict(self)
        if not self.index:
            del settings["index"], settings["form"]
            return settings
        kind = "http"
        if self.index.startswith("http"):
            settings = {"kind": kind, "encoder": "", "index": self.index, "form": self.form}
        else:
            try:
                settings["index"] = index_identity(self.index)
            except UserError as error:
                raise UserError(
                    f"retriever.index={self.index!r}: {error} Give a folder that launch/build_index.py wrote, or the "
                    "http://... address of a search service."
                ) from error
            kind = settings["index"]["kind"]
        if self.encoder and kind in ("http", "bm25"):
            raise UserError(
                f"retriever.encoder={self.encoder!r} has no meaning with retriever.index={self.index!r} of kind {kind}, for "
                "which this run embeds no text; leave it out, or, if the config sets it, give --config.retriever.encoder="
            )
        return settings

    def bm25(self) -> Bm25Config:
        """Return the settings of BM25. Raises UserError if one is out of range."""
        return Bm25Config(k1=self.k1, b=self.b, title_weight=self.title_weight)


def load_retriever(
    passages: Sequence[Passage],
    config: RetrieverConfig,
    encoder: TextEncoder | None,
    seconds: float = 60.0,
    workdir: Path | None = None,
) -> Retriever | None:
    """Return the retriever of a config.

    Args:
        passages: indexed unless the config names an index or a service.
        config: kind and settings of the retriever.
        encoder: text encoder for scann and exact.
        seconds: time limit of a search on a search service, which gets `SEARCH_ATTEMPTS` attempts within it. 0: the default of
            `open_remote`.
        workdir: folder in which a large index over embeddings is stored, so that a resumed run finds the same passages
            (ScaNN's builder is not deterministic); None: no index is stored.

    Returns:
        The retriever; None if it is off.

    Raises:
        UserError: a search service does not answer.
    """
    if config.kind == "off":
        return None
    if config.index.startswith("http"):
        retry_policy = RetryPolicy(time_out=seconds / SEARCH_ATTEMPTS or None, retries=SEARCH_ATTEMPTS - 1)
        _require_service(config, retry_policy)
        return open_remote(config.index, config.form, retry_policy)
    if config.index:
        return open_index(config.index, encoder)
    if workdir is None:
        return make_retriever(passages, config.kind, encoder, config.bm25())
    return stored_retriever(passages, config.kind, encoder, workdir / INDEXES_FOLDER, config.bm25())


def _require_service(config: RetrieverConfig, retry_policy: RetryPolicy) -> None:
    """Raise UserError if a search service does not answer. A run would otherwise score episodes without search results."""
    try:
        open_remote(config.index, config.form, retry_policy).search(["search"], 1)
    except SearchFailed as error:
        raise UserError(
            f"retriever.index={config.index}: {error}. Start the service, or give its address and retriever.form "
            f"({', '.join(FORMS)}; {config.form!r} now)"
        ) from error


def encoder_folder(config: RetrieverConfig, where: str = "retriever") -> str:
    """Return the folder of the encoder that a retriever config needs; "" if it needs none.

    Raises:
        UserError: the encoder is needed and not given, or its folder is missing. The message names the field; `where` is the
            name of its section.
    """
    if config.kind == "off" or (config.kind == "bm25" and not config.index):
        return ""
    if not config.encoder and not config.index:
        raise UserError(
            f"{where}.kind={config.kind} needs {where}.encoder, an encoder folder; or set {where}.kind=bm25"
        )
    if config.encoder:
        require_folder(f"{where}.encoder", config.encoder)
    return config.encoder


def load_retriever_encoder(config: RetrieverConfig, where: str = "retriever") -> TextEncoder | None:
    """Load the text encoder that a retriever config needs; None if it needs none. Raises UserError as `encoder_folder`."""
    folder = encoder_folder(config, where)
    if not folder:
        return None
    return dataclasses.replace(load_text_encoder(folder), titles=config.title_weight > 0)
