"""The questions and corpus of an evaluation, from a question file, a data folder or miniwiki, the built-in synthetic world.

Read `DatasetConfig` and `load_dataset` first.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rrl.data.folder import load_folder
from rrl.data.passages import Passage, fingerprint, load_passages
from rrl.data.questions import Question, load_questions
from rrl.data.records import RunOnError, on_error_for, record_places
from rrl.errors import UserError, at_least, one_of
from rrl.miniwiki import KINDS, generate, mixed_questions
from rrl.retrieval.retriever import Retriever
from rrl.runs.datasets import HELD_OUT_SPLITS
from rrl.runs.retriever import RetrieverConfig, encoder_folder, load_retriever, load_retriever_encoder
from rrl.text.normalize import title_key

MINIWIKI = "miniwiki"
SPLIT_PREFERENCE = ("test", "dev", "questions", "train")
"""Splits of a data folder, in order of preference. The default is the first of these that has gold answers."""
_NamedData = tuple[str, list[Question], str, Sequence[Passage]]
"""Name, questions, name of the corpus, and passages."""


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
    """The questions of an evaluation, and the corpus that is searched."""

    path: str = MINIWIKI
    """A question file, a folder with question files and a corpus, or "miniwiki": the built-in data, which
    consist of generated worlds with passages and questions (`rrl.miniwiki`)."""
    corpus: str = ""
    """File with the passages, for a question file. If the questions contain their passages, give the question file here too."""
    truth: str = ""
    """File with the gold answers, for a question file without them (MultiHop-RAG)."""
    split: str = ""
    """Split of a folder: train, dev, test or questions; "": the first of test, dev, questions, train that has gold answers. Split
    of miniwiki: test or dev; "": test."""
    questions: int = 0
    """Number of questions, drawn without replacement. 0: all; miniwiki then has 720."""
    seed: int = 1
    """Seed of the draw of `questions`, and of miniwiki."""
    worlds: int = 8
    """Number of worlds in miniwiki; their passages form one corpus. The defaults of this field and the next two are those of the
    held-out questions in training."""
    world_size: int = 200
    """Passages in one world of miniwiki."""
    per_kind: int = 144
    """Questions of each kind in miniwiki, over all worlds, if `questions` is 0."""
    on_error: RunOnError = "refuse"
    """How to handle a broken record, and a question whose prompt is too long for the context, as in training
    (`rrl.runs.datasets.DataConfig`)."""

    def __post_init__(self) -> None:
        at_least(0, self, "questions", "seed")
        at_least(1, self, "worlds", "world_size", "per_kind")
        one_of(typing.get_args(RunOnError), self, "on_error")
        if self.path == MINIWIKI and self.split not in ("", *HELD_OUT_SPLITS):
            raise UserError(
                f"split={self.split!r} is not a split of the built-in world; choose one of {', '.join(HELD_OUT_SPLITS)}"
            )
        if self.split and self.split not in SPLIT_PREFERENCE:
            raise UserError(f"split={self.split!r} is unknown; choose one of {', '.join(SPLIT_PREFERENCE)}")
        is_file = self.path != MINIWIKI and not Path(self.path).is_dir()
        if is_file and not Path(self.path).is_file():
            raise UserError(
                f"path={self.path!r} is not miniwiki, a question file, or a folder of question files; give one of these"
            )
        for field in ("corpus", "truth"):
            if getattr(self, field) and not is_file:
                raise UserError(
                    f"{field}={getattr(self, field)!r} applies to a question file only; path={self.path!r} contains its own"
                )
        if self.split and is_file:
            raise UserError(
                f"split={self.split!r} applies to a folder or the built-in world; {self.path} is one file of questions"
            )


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Questions with unique ids, and the corpus that is searched for them."""

    name: str
    questions: list[Question]
    retriever: Retriever | None = None
    """None if nothing is searched, and before `with_retriever`."""
    corpus: str = ""
    """Name of the corpus; "" if nothing is searched."""
    corpus_sha256: str = ""
    """Fingerprint of the corpus; "" if it is not known (a search service)."""
    passages: Sequence[Passage] = ()
    """Passages of the corpus. Those of an index folder are added by `with_retriever`; empty for a search service."""


def load_dataset(
    config: DatasetConfig,
    retriever: RetrieverConfig,
    searches: bool = True,
    log: Callable[[str], None] = lambda text: None,
) -> Dataset:
    """Read the questions, and the corpus if the method `searches` and the retriever is not off. No index is built yet.

    `log` receives progress lines and warnings.

    Raises UserError for a file of the wrong format or a question without a gold answer (both with the line), a repeated id, more
    questions than the file has, or a missing corpus.
    """
    searches = searches and retriever.kind != "off"
    if searches:
        encoder_folder(retriever)
    name, questions, corpus, passages = _read(config, searches and not retriever.index)
    multiple_choice = sum(bool(question.choices) for question in questions)
    if 0 < multiple_choice < len(questions):
        raise UserError(
            f"{config.path}: {multiple_choice} of {len(questions)} questions are multiple choice; put them into a separate file"
        )
    log(f"{name}: {len(questions)} questions")
    if not searches:
        return Dataset(name, questions)
    if passages and (missing := _count_gold_not_in_corpus(questions, passages)):
        log(
            f"warning: for {missing} questions the corpus has no gold passage, by title or id; "
            f"check that {corpus} is the corpus of these questions"
        )
    if retriever.index:
        manifest = retriever.identity()["index"]
        corpus_sha256 = str(manifest.get("corpus", "")) if isinstance(manifest, Mapping) else ""
        return Dataset(name, questions, None, retriever.index, corpus_sha256)
    return Dataset(name, questions, None, corpus, fingerprint(passages), passages)


def with_retriever(
    dataset: Dataset,
    retriever: RetrieverConfig,
    seconds: float = 60.0,
    workdir: Path | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> Dataset:
    """Return the dataset with a retriever over its corpus, if it has a corpus.

    `seconds` is the time limit of a search on a search service, and unused for other indexes. `workdir` stores a large index
    (see `rrl.runs.retriever.load_retriever`).
    """
    if not dataset.corpus:
        return dataset
    action = f"searching {retriever.index}" if retriever.index else f"indexing with {retriever.kind}"
    size = f", {len(dataset.passages)} passages" if dataset.passages else ""
    log(f"{dataset.corpus}: {action}{size}")
    search = load_retriever(dataset.passages, retriever, load_retriever_encoder(retriever), seconds, workdir)
    local = retriever.index and not retriever.index.startswith("http")
    passages = search.passages if search is not None and local else dataset.passages
    return dataclasses.replace(dataset, retriever=search, passages=passages)


def _read(config: DatasetConfig, with_passages: bool) -> _NamedData:
    """Read the questions, and the passages if `with_passages`."""
    if config.path == MINIWIKI:
        return _generate_miniwiki(config)
    if Path(config.path).is_dir():
        return _read_folder(config, with_passages)
    return _read_file(config, with_passages)


def _generate_miniwiki(config: DatasetConfig) -> _NamedData:
    split = config.split or "test"
    wiki = generate(split, config.seed, config.worlds * config.world_size, config.worlds)
    per_kind = -(-config.questions // len(KINDS)) or config.per_kind
    items = mixed_questions(wiki, per_kind, KINDS, config.seed)
    name = f"miniwiki {split}, seed {config.seed}"
    return name, [item.question for item in items][: config.questions or None], name, wiki.passages


def _read_folder(config: DatasetConfig, with_passages: bool) -> _NamedData:
    path = Path(config.path)
    folder = load_folder(path, on_error_for(config.on_error), corpus=with_passages)
    if config.split and config.split not in folder.files:
        raise UserError(
            f"data folder {path}: no file of the split {config.split!r}; it has {', '.join(folder.files)}"
        )
    chosen = (
        (config.split, folder.questions(config.split))
        if config.split
        else folder.first_split_with_answers(SPLIT_PREFERENCE)
    )
    if chosen is None:
        raise UserError(f"data folder {path}: none of its question files has gold answers; give one")
    split, questions = chosen
    questions = _draw(questions, config, folder.file(split))
    return f"{path.name} {split}", questions, path.name, folder.passages


def _read_file(config: DatasetConfig, with_passages: bool) -> _NamedData:
    path, on_error = Path(config.path), on_error_for(config.on_error)
    questions = _draw(load_questions(path, on_error, truth=config.truth or None), config, path)
    if not with_passages:
        return path.name, questions, "", []
    if not config.corpus:
        raise UserError(
            f"data.corpus='': {path} is a file of questions and the method searches. Give corpus=FILE (the same file if its "
            "questions contain their passages), retriever.index, or retriever=off"
        )
    return path.name, questions, Path(config.corpus).name, load_passages(config.corpus, on_error)


def _count_gold_not_in_corpus(questions: Sequence[Question], passages: Sequence[Passage]) -> int:
    """Return the number of questions that have gold passages of which the corpus has none."""
    titles, ids = {title_key(passage.title) for passage in passages}, {passage.id for passage in passages}
    return sum(
        bool(q.gold or q.gold_ids)
        and titles.isdisjoint(map(title_key, q.gold))
        and ids.isdisjoint(q.gold_ids)
        for q in questions
    )


def _draw(questions: list[Question], config: DatasetConfig, file: Path) -> list[Question]:
    """Return `config.questions` random questions, in the order of the file. Raises UserError for a repeated id."""
    _reject_repeated(file, questions)
    if config.questions > len(questions):
        raise UserError(
            f"data.questions={config.questions} must be at most {len(questions)}, the number of questions in {config.path}"
        )
    if not config.questions:
        return questions
    order = np.random.default_rng(config.seed).permutation(len(questions))[: config.questions]
    return [questions[at] for at in np.sort(order)]


def _reject_repeated(file: Path, questions: Sequence[Question]) -> None:
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            first, second, *_ = record_places(file, question.id)
            raise UserError(
                f"{file}, {second}: the id {question.id!r} occurs twice, first at {first}; ids must be unique, because results "
                "are stored by id"
            )
        seen.add(question.id)
