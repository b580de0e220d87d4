"""What an evaluation asks and searches: a question file or folder of a publisher's, or the built-in world."""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rrl.data.folder import load_folder
from rrl.data.passages import Passage, fingerprint, load_passages
from rrl.data.questions import Question, load_questions
from rrl.data.records import OnFault, on_broken, record_places
from rrl.errors import UserError, at_least, one_of
from rrl.miniwiki import KINDS, generate, mixed_questions
from rrl.retrieval.retriever import Retriever
from rrl.runs.datasets import (
    HELD_OUT_SPLITS,
    RetrieverConfig,
    encoder_folder,
    load_retriever,
    load_retriever_encoder,
)
from rrl.text.normalize import title_key

MINIWIKI = "miniwiki"
HELD_OUT = ("test", "dev", "questions", "train")
"""Which split of a folder is asked where none is named: the first of these that it has."""


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
    """Which questions are asked, and over which passages."""

    path: str = MINIWIKI
    """miniwiki, a question file, or a folder with question files and a corpus."""
    corpus: str = ""
    """Of a question file: its passages; the same file, where its questions bring theirs."""
    truth: str = ""
    """Of a question file without answers: the file that has them (MultiHop-RAG)."""
    split: str = ""
    """Of a folder: train, dev, test or questions, "" for the first of test, dev, questions, train that is there. Of the built-in
    world: test or dev, "" for test."""
    questions: int = 0
    """So many of them, drawn without replacement; 0: all, of the built-in world 720."""
    seed: int = 1
    """Of that draw, and of the built-in world."""
    worlds: int = 8
    """Of the built-in world, as in training's held-out questions; so are the two below."""
    world_size: int = 200
    per_kind: int = 144
    """Questions of each kind, where `questions` is 0."""
    on_error: OnFault = "refuse"
    """As in training (`rrl.runs.datasets.DataConfig`)."""

    def __post_init__(self) -> None:
        at_least(0, self, "questions", "seed")
        at_least(1, self, "worlds", "world_size", "per_kind")
        one_of(typing.get_args(OnFault), self, "on_error")
        if self.path == MINIWIKI and self.split not in ("", *HELD_OUT_SPLITS):
            raise UserError(
                f"split={self.split!r} is none of the built-in world's: {', '.join(HELD_OUT_SPLITS)}"
            )
        if self.split and self.split not in HELD_OUT:
            raise UserError(f"split={self.split!r} is unknown; there are {', '.join(HELD_OUT)}")
        file = self.path != MINIWIKI and not Path(self.path).is_dir()
        if file and not Path(self.path).is_file():
            raise UserError(
                f"path={self.path!r} is neither miniwiki, nor a question file, nor a folder of them; give one"
            )
        for field in ("corpus", "truth"):
            if getattr(self, field) and not file:
                raise UserError(
                    f"{field}={getattr(self, field)!r} goes with a question file; path={self.path!r} has its own"
                )
        if self.split and file:
            raise UserError(f"split={self.split!r} goes with a folder; {self.path} is one file of questions")


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Questions with unique ids, and what is searched for them."""

    name: str
    questions: list[Question]
    retriever: Retriever | None = None
    """None where nothing is searched, and before `with_retriever`."""
    corpus: str = ""
    """Name of what is searched; "" where nothing is."""
    corpus_sha256: str = ""
    """Its fingerprint; "" where it is not known (a search service)."""
    passages: Sequence[Passage] = ()
    """Of the corpus; of an index folder or a search service only its retriever has them."""


def load_dataset(
    config: DatasetConfig,
    retriever: RetrieverConfig,
    searches: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Dataset:
    """The questions, and the corpus where the method `searches` and the retriever is not off; no index is built yet.

    Raises UserError for a file of the wrong form, a question without a gold answer (both with the line), an id that comes twice,
    more questions than there are, and a corpus that is needed and not given.
    """
    searches = searches and retriever.kind != "off"
    if searches:
        encoder_folder(retriever)
    name, questions, corpus, passages = _read(config, searches and not retriever.index)
    choosing = sum(bool(question.choices) for question in questions)
    if 0 < choosing < len(questions):
        raise UserError(
            f"{config.path}: {choosing} of {len(questions)} questions are a multiple choice; put them into a file of their own"
        )
    say(f"{name}: {len(questions)} questions")
    if not searches:
        return Dataset(name, questions)
    if passages and (lacking := _not_there(questions, passages)):
        say(
            f"warning: {lacking} questions have gold passages none of which the corpus has, by their titles or ids: is {corpus} "
            "theirs?"
        )
    if retriever.index:
        identity = retriever.identity()["index"]
        known = identity if isinstance(identity, Mapping) else {}
        return Dataset(name, questions, None, retriever.index, str(known.get("corpus", "")))
    return Dataset(name, questions, None, corpus, fingerprint(passages), passages)


def with_retriever(
    dataset: Dataset,
    retriever: RetrieverConfig,
    seconds: float = 60.0,
    workdir: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Dataset:
    """The dataset with the retriever over its corpus, where it has one; arguments as of `rrl.runs.datasets.load_retriever`."""
    if not dataset.corpus:
        return dataset
    doing = f"searching {retriever.index}" if retriever.index else f"indexing with {retriever.kind}"
    some = f", {len(dataset.passages)} passages" if dataset.passages else ""
    say(f"{dataset.corpus}: {doing}{some}")
    search = load_retriever(dataset.passages, retriever, load_retriever_encoder(retriever), seconds, workdir)
    local = retriever.index and not retriever.index.startswith("http")
    passages = search.passages if search is not None and local else dataset.passages
    return dataclasses.replace(dataset, retriever=search, passages=passages)


def _read(config: DatasetConfig, corpus: bool) -> tuple[str, list[Question], str, Sequence[Passage]]:
    """Name, questions, name of the corpus, and its passages where they are wanted."""
    if config.path == MINIWIKI:
        split = config.split or "test"
        wiki = generate(split, config.seed, config.worlds * config.world_size, config.worlds)
        per_kind = -(-config.questions // len(KINDS)) or config.per_kind
        items = mixed_questions(wiki, per_kind, KINDS, config.seed)
        name = f"miniwiki {split}, seed {config.seed}"
        return name, [item.question for item in items][: config.questions or None], name, wiki.passages
    path = Path(config.path)
    if path.is_dir():
        folder = load_folder(path, on_broken(config.on_error), corpus=corpus)
        if config.split and config.split not in folder.files:
            raise UserError(
                f"data folder {path}: no file of the split {config.split!r}; it has {', '.join(folder.files)}"
            )
        found = (
            folder.first_answered(HELD_OUT)
            if not config.split
            else (config.split, folder.questions(config.split))
        )
        if found is None:
            raise UserError(f"data folder {path}: none of its question files has gold answers; give one")
        split, questions = found
        questions = _drawn(questions, config, folder.file(split))
        return f"{path.name} {split}", questions, path.name, folder.passages
    questions = _drawn(
        load_questions(path, on_broken(config.on_error), truth=config.truth or None), config, path
    )
    if not corpus:
        return path.name, questions, "", []
    if not config.corpus:
        raise UserError(
            f"data.corpus='': {path} is a file of questions and the method searches. Give corpus=FILE (the same file, where its "
            "questions bring their passages), retriever.index, or retriever=off"
        )
    return (
        path.name,
        questions,
        Path(config.corpus).name,
        load_passages(config.corpus, on_broken(config.on_error)),
    )


def _not_there(questions: Sequence[Question], passages: Sequence[Passage]) -> int:
    """How many questions have gold passages, but none of them in the corpus."""
    titles, ids = {title_key(passage.title) for passage in passages}, {passage.id for passage in passages}
    return sum(
        bool(q.gold or q.gold_ids)
        and titles.isdisjoint(map(title_key, q.gold))
        and ids.isdisjoint(q.gold_ids)
        for q in questions
    )


def _drawn(questions: list[Question], config: DatasetConfig, file: Path) -> list[Question]:
    _refuse_repeated(file, questions)
    if config.questions > len(questions):
        raise UserError(
            f"data.questions={config.questions} must be at most {len(questions)}, which {config.path} has"
        )
    if not config.questions:
        return questions
    order = np.random.default_rng(config.seed).permutation(len(questions))[: config.questions]
    return [questions[at] for at in np.sort(order)]


def _refuse_repeated(file: Path, questions: Sequence[Question]) -> None:
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            first, second, *_ = record_places(file, question.id)
            raise UserError(
                f"{file}, {second}: the id {question.id!r} is there twice, first at {first}; ids must be unique, since results "
                "are kept by them"
            )
        seen.add(question.id)
