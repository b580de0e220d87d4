"""What a run trains and is tested on: the built-in world, or a folder of real questions and passages."""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rrl.data.folder import DataFolder, load_folder
from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.records import OnFault, on_broken
from rrl.errors import UserError, at_least, one_of
from rrl.miniwiki import KINDS, generate, mixed_questions
from rrl.miniwiki.names import SPLITS
from rrl.models.weights import require_folder
from rrl.retrieval.bm25 import Bm25Config
from rrl.retrieval.encode import TextEncoder, load_text_encoder
from rrl.retrieval.folder import KINDS as INDEXES
from rrl.retrieval.folder import index_identity, stamp
from rrl.retrieval.index import make_retriever, open_index, stored_retriever
from rrl.retrieval.remote import open_remote
from rrl.retrieval.retriever import Retriever, RetryPolicy, SearchFailed
from rrl.retrieval.wire import FORMS

HELD_OUT_SPLITS = tuple(split for split in SPLITS if split != "train")
"""Splits of the built-in world whose names training never shows."""

SEARCH_ATTEMPTS = 3
"""At a search that a service does not answer."""

INDEXES_FOLDER = "indexes"
"""Folder of a workdir with the indexes that its run built (see `stored_retriever`)."""


@dataclasses.dataclass(frozen=True)
class RetrieverConfig:
    """The search engine of a run."""

    kind: str = "scann"
    """scann, exact, bm25, or off: every search returns nothing."""
    encoder: str = ""
    """Folder of the encoder, for scann and exact."""
    title_weight: int = 3
    """How often the title counts for BM25. 0 leaves titles out, of embeddings too; there any other number is 1."""
    k1: float = 0.9
    b: float = 0.4
    index: str = ""
    """An index folder, or http://… of a search service: in place of an index built here, whatever `kind` says but off."""
    form: str = "search-r1"
    """What a service speaks: search-r1, flashrag or r1-searcher."""

    def __post_init__(self) -> None:
        one_of((*INDEXES, "off"), self, "kind")
        one_of(FORMS, self, "form")
        self.bm25()

    def identity(self) -> dict[str, Any]:
        """The settings that decide what is found; an index by its content. Those of an index only where there is one, and of a
        service nothing else."""
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
                    f"retriever.index={self.index!r}: {error} Give a folder of launch/build_index.py, or http://... of a "
                    "search service."
                ) from error
            kind = settings["index"]["kind"]
        if self.encoder and kind in ("http", "bm25"):
            raise UserError(
                f"retriever.encoder={self.encoder!r} has no meaning with retriever.index={self.index!r}, which takes words "
                f"({kind}); leave it out, with --config.retriever.encoder= where it is the config's own"
            )
        return settings

    def bm25(self) -> Bm25Config:
        """The settings of BM25 among them; UserError for one out of range."""
        return Bm25Config(k1=self.k1, b=self.b, title_weight=self.title_weight)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where questions and passages come from."""

    path: str = "miniwiki"
    """The built-in world, or a folder with question files and a corpus."""
    seed: int = 0
    train_worlds: int = 32
    held_out_worlds: int = 8
    world_size: int = 200
    """Passages of one built-in world."""
    train_per_kind: int = 2000
    """Training questions of each kind."""
    held_out_per_kind: int = 144
    held_out_split: str = "test"
    kinds: tuple[str, ...] = KINDS
    held_out: int = 500
    """Questions of a folder that are held out at most."""
    on_error: OnFault = "refuse"
    """What a fault does. refuse: a broken record refuses its file; skip: broken records are skipped and counted. With both, a
    question that is too long for the context ends as context_limit. stop: as refuse, and such a question stops the run."""

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
    """Questions and the retriever over the passages that answer them."""

    questions: list[Question]
    retriever: Retriever | None
    passages: Sequence[Passage]


def load_retriever(
    passages: Sequence[Passage],
    config: RetrieverConfig,
    encoder: TextEncoder | None,
    seconds: float = 60.0,
    workdir: Path | None = None,
) -> Retriever | None:
    """The retriever of a config: over passages in memory unless it names an index; None when it is off.

    After `seconds` a search is given up by who asks; a search service is tried `SEARCH_ATTEMPTS` times within them. With a
    `workdir`, an index that would come out otherwise when built again is stored there, so that a resumed run finds the same
    passages. Raises UserError for a service that does not answer.
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
    """Raises UserError for a search service that does not answer: a run over it would find nothing, and score that."""
    try:
        open_remote(config.index, config.form, retry_policy).search(["search"], 1)
    except SearchFailed as error:
        raise UserError(
            f"retriever.index={config.index}: {error}. Start the service, or give its address and retriever.form "
            f"({', '.join(FORMS)}; {config.form!r} now)"
        ) from error


def encoder_folder(config: RetrieverConfig, where: str = "retriever") -> str:
    """The folder of the encoder that a retriever config needs, or nothing.

    Raises UserError that names the field where one is needed and not given, or not there; `where` is the section.
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
    """The text encoder that a retriever config needs; errors as `encoder_folder`."""
    folder = encoder_folder(config, where)
    if not folder:
        return None
    return dataclasses.replace(load_text_encoder(folder), titles=config.title_weight > 0)


def data_fingerprint(folder: str) -> dict[str, Any]:
    """What is in a data folder, wherever it lies: the size of each file, and a hash of its content."""
    files = [file for file in sorted(Path(folder).iterdir()) if file.is_file()]
    stamps = {file.name: stamp(file) for file in files}
    return {
        "files": {name: found["bytes"] for name, found in stamps.items()},
        "content": {name: found["sha256"] for name, found in stamps.items()},
    }


def load_datasets(
    data: DataConfig,
    retriever: RetrieverConfig,
    say: Callable[[str], None] = lambda text: None,
    search_seconds: float = 60.0,
    workdir: Path | None = None,
) -> tuple[SearchDataset, SearchDataset]:
    """The training corpus and the held-out one.

    In the built-in world they share no entity. A folder has one corpus; its test (or dev) questions are held out, and
    with one question file only, every fifth question of it. `search_seconds` and `workdir` as in `load_retriever`.
    """
    encoder = load_retriever_encoder(retriever)
    if data.path == "miniwiki":
        if retriever.index:
            raise UserError(
                "retriever.index goes with data=FOLDER; the built-in world makes its own passages"
            )
        sides = (
            ("train", data.train_worlds, data.train_per_kind),
            (data.held_out_split, data.held_out_worlds, data.held_out_per_kind),
        )
        corpora = []
        for split, worlds, per_kind in sides:
            wiki = generate(split, data.seed, worlds * data.world_size, worlds)
            items = mixed_questions(wiki, per_kind, data.kinds, data.seed)
            say(
                f"miniwiki {split}: {worlds} worlds, {len(wiki.passages)} passages, {len(items)} questions; indexing"
            )
            search = load_retriever(wiki.passages, retriever, encoder, workdir=workdir)
            corpora.append(SearchDataset([item.question for item in items], search, wiki.passages))
        return corpora[0], corpora[1]
    folder = load_folder(data.path, on_broken(data.on_error), corpus=not retriever.index)
    doing = f"searching {retriever.index}" if retriever.index else f"indexing with {retriever.kind}"
    say(f"{data.path}: {len(folder.passages)} passages; {doing}")
    search = load_retriever(folder.passages, retriever, encoder, search_seconds, workdir)
    train, held_out = split_questions(folder)
    say(f"{data.path}: {len(train)} training questions, {len(held_out[: data.held_out])} held out")
    return SearchDataset(train, search, folder.passages), SearchDataset(
        held_out[: data.held_out], search, folder.passages
    )


def split_questions(folder: DataFolder) -> tuple[list[Question], list[Question]]:
    """Training and held-out questions of a folder: of two files with gold answers, or of the only one.

    Held out is the test file, else the dev file, ...; files without gold answers are not used.
    """
    held = folder.first_answered(("test", "dev", "questions", "train"))
    if held is None:
        raise UserError(f"data folder {folder.path}: none of its question files has gold answers; give one")
    split, questions = held
    rest = folder.first_answered(("train", "questions", "dev"), but=split)
    return (rest[1], questions) if rest else hold_out(questions)


def hold_out(questions: list[Question]) -> tuple[list[Question], list[Question]]:
    """Training and held-out questions of one file: every fifth is held out."""
    train = [question for place, question in enumerate(questions) if place % 5]
    if not train:
        raise UserError(
            f"{len(questions)} questions are too few to hold one out and train on the rest; give at least 2"
        )
    return train, questions[::5]
