"""Questions, passages and retriever of a run: from the built-in synthetic data (`rrl.miniwiki`), or from a folder of real data.

Read `load_datasets` first.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rrl.data.folder import DataFolder, load_folder
from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.records import OnFault, on_error_for
from rrl.errors import UserError, at_least, one_of
from rrl.miniwiki import KINDS, generate, mixed_questions
from rrl.miniwiki.names import SPLITS
from rrl.models.weights import require_folder
from rrl.retrieval.bm25 import Bm25Config
from rrl.retrieval.encode import TextEncoder
from rrl.retrieval.encoder_folder import load_text_encoder
from rrl.retrieval.folder import KINDS as INDEXES
from rrl.retrieval.folder import index_identity, size_and_hash
from rrl.retrieval.index import make_retriever, open_index, stored_retriever
from rrl.retrieval.remote import open_remote
from rrl.retrieval.retriever import Retriever, RetryPolicy, SearchFailed
from rrl.retrieval.wire import FORMS

HELD_OUT_SPLITS = tuple(split for split in SPLITS if split != "train")
"""Splits of the built-in world that share no name with training."""

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
    """An index folder, or the http://… address of a search service. It replaces an index built by this run, for every `kind`
    except off."""
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


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where questions and passages come from."""

    path: str = "miniwiki"
    """miniwiki for the built-in synthetic data, or a folder with question files and a corpus. The built-in data consist of many
    small worlds, each with its own entities and passages."""
    seed: int = 0
    """Seed of the built-in worlds."""
    train_worlds: int = 32
    """Number of built-in worlds for training."""
    held_out_worlds: int = 8
    """Number of built-in worlds for evaluation."""
    world_size: int = 200
    """Passages per built-in world."""
    train_per_kind: int = 2000
    """Training questions of each kind, over all built-in worlds."""
    held_out_per_kind: int = 144
    """Held-out questions of each kind, over all built-in worlds."""
    held_out_split: str = "test"
    """Split of the held-out worlds: test, or dev for tuning."""
    kinds: tuple[str, ...] = KINDS
    """Kinds of questions in the built-in worlds."""
    held_out: int = 500
    """Largest number of held-out questions of a folder."""
    on_error: OnFault = "refuse"
    """What happens with broken records and with questions that do not fit the context. Broken records: refuse and stop raise an
    error; skip skips and counts them. Questions that do not fit: stop raises an error; with refuse and skip their episodes end
    as context_limit."""

    def __post_init__(self) -> None:
        at_least(0, self, "seed", "held_out")
        at_least(
            1, self, "train_worlds", "held_out_worlds", "world_size", "train_per_kind", "held_out_per_kind"
        )
        one_of(HELD_OUT_SPLITS, self, "held_out_split")
        one_of(typing.get_args(OnFault), self, "on_error")
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise UserError(f"kinds={self.kinds} must be some of {', '.join(KINDS)}")


@dataclasses.dataclass(frozen=True)
class SearchDataset:
    """Questions, and the retriever over the passages that answer them."""

    questions: list[Question]
    retriever: Retriever | None
    """None if the retriever is off."""
    passages: Sequence[Passage]
    """Empty if `RetrieverConfig.index` is given, which has its own passages."""


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
        seconds: time limit of a search. A search service gets `SEARCH_ATTEMPTS` attempts within it.
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


def data_fingerprint(folder: str) -> dict[str, Any]:
    """Return size and SHA-256 of each file of a data folder, which identify the data also after the folder has moved."""
    files = [file for file in sorted(Path(folder).iterdir()) if file.is_file()]
    entries = {file.name: size_and_hash(file) for file in files}
    return {
        "files": {name: entry["bytes"] for name, entry in entries.items()},
        "content": {name: entry["sha256"] for name, entry in entries.items()},
    }


def load_datasets(
    data: DataConfig,
    retriever: RetrieverConfig,
    log: Callable[[str], None] = lambda text: None,
    search_seconds: float = 60.0,
    workdir: Path | None = None,
) -> tuple[SearchDataset, SearchDataset]:
    """Return the training dataset and the held-out dataset.

    In the built-in data the two share no entity. A data folder has one corpus for both; its test (or dev) questions are held
    out. If it has only one question file, every fifth question is held out.

    Args:
        data: source of questions and passages.
        retriever: kind and settings of the retriever.
        log: called with progress lines.
        search_seconds: `seconds` of `load_retriever`.
        workdir: see `load_retriever`.

    Raises:
        UserError: wrong settings, broken data, or a search service that does not answer.
    """
    encoder = load_retriever_encoder(retriever)
    if data.path == "miniwiki":
        if retriever.index:
            raise UserError(
                "retriever.index needs data=FOLDER; the built-in world generates its own passages"
            )
        splits = (
            ("train", data.train_worlds, data.train_per_kind),
            (data.held_out_split, data.held_out_worlds, data.held_out_per_kind),
        )
        datasets = []
        for split, worlds, per_kind in splits:
            wiki = generate(split, data.seed, worlds * data.world_size, worlds)
            items = mixed_questions(wiki, per_kind, data.kinds, data.seed)
            log(
                f"miniwiki {split}: {worlds} worlds, {len(wiki.passages)} passages, {len(items)} questions; indexing"
            )
            search_retriever = load_retriever(wiki.passages, retriever, encoder, workdir=workdir)
            datasets.append(SearchDataset([item.question for item in items], search_retriever, wiki.passages))
        return datasets[0], datasets[1]
    folder = load_folder(data.path, on_error_for(data.on_error), corpus=not retriever.index)
    action = f"searching {retriever.index}" if retriever.index else f"indexing with {retriever.kind}"
    log(f"{data.path}: {len(folder.passages)} passages; {action}")
    search_retriever = load_retriever(folder.passages, retriever, encoder, search_seconds, workdir)
    train, held_out = split_questions(folder)
    log(f"{data.path}: {len(train)} training questions, {len(held_out[: data.held_out])} held out")
    return SearchDataset(train, search_retriever, folder.passages), SearchDataset(
        held_out[: data.held_out], search_retriever, folder.passages
    )


def split_questions(folder: DataFolder) -> tuple[list[Question], list[Question]]:
    """Return the training and the held-out questions of a folder.

    Only question files with gold answers are used. The held-out questions come from the first existing file in the order "test",
    "dev", "questions", "train"; the training questions from the first other file in the order "train", "questions", "dev". If
    there is only one file, `hold_out` splits it.
    """
    held_out = folder.first_split_with_answers(("test", "dev", "questions", "train"))
    if held_out is None:
        raise UserError(
            f"data folder {folder.path}: none of its question files has gold answers; add one that has"
        )
    split, questions = held_out
    rest = folder.first_split_with_answers(("train", "questions", "dev"), exclude=split)
    return (rest[1], questions) if rest else hold_out(questions)


def hold_out(questions: list[Question]) -> tuple[list[Question], list[Question]]:
    """Split the questions of one file into training and held-out ones: every fifth is held out."""
    train = [question for index, question in enumerate(questions) if index % 5]
    if not train:
        raise UserError(
            f"{len(questions)} questions are too few to hold one out and train on the rest; give at least 2"
        )
    return train, questions[::5]
