"""Questions and passages of a run: from the built-in synthetic data (`rrl.miniwiki`), or from a folder of real data.

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
from rrl.data.records import RunOnError, on_error_for
from rrl.errors import UserError, at_least, one_of
from rrl.miniwiki import KINDS, generate, mixed_questions
from rrl.miniwiki.names import SPLITS
from rrl.retrieval.encode import TextEncoder
from rrl.retrieval.folder import size_and_hash
from rrl.retrieval.retriever import Retriever
from rrl.runs.retriever import RetrieverConfig, load_retriever, load_retriever_encoder

HELD_OUT_SPLITS = tuple(split for split in SPLITS if split != "train")
"""Splits of the built-in world whose entity names do not occur in the training split."""


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
    on_error: RunOnError = "refuse"
    """How to treat a broken record, and a question whose prompt is too long for the context.

    - refuse: a broken record is an error. The episode of a question that is too long ends as context_limit.
    - skip: broken records are skipped and counted. The episode of a question that is too long ends as context_limit.
    - stop: both are errors."""

    def __post_init__(self) -> None:
        at_least(0, self, "seed", "held_out")
        at_least(
            1, self, "train_worlds", "held_out_worlds", "world_size", "train_per_kind", "held_out_per_kind"
        )
        one_of(HELD_OUT_SPLITS, self, "held_out_split")
        one_of(typing.get_args(RunOnError), self, "on_error")
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
        train, held_out = (
            _generated_dataset(data, split, retriever, encoder, log, workdir)
            for split in ("train", data.held_out_split)
        )
        return train, held_out
    folder = load_folder(data.path, on_error_for(data.on_error), corpus=not retriever.index)
    action = f"searching {retriever.index}" if retriever.index else f"indexing with {retriever.kind}"
    log(f"{data.path}: {len(folder.passages)} passages; {action}")
    search_retriever = load_retriever(folder.passages, retriever, encoder, search_seconds, workdir)
    train_questions, all_held_out = split_questions(folder)
    held_out_questions = all_held_out[: data.held_out]
    log(f"{data.path}: {len(train_questions)} training questions, {len(held_out_questions)} held out")
    return (
        SearchDataset(train_questions, search_retriever, folder.passages),
        SearchDataset(held_out_questions, search_retriever, folder.passages),
    )


def _generated_dataset(
    data: DataConfig,
    split: str,
    retriever: RetrieverConfig,
    encoder: TextEncoder | None,
    log: Callable[[str], None],
    workdir: Path | None,
) -> SearchDataset:
    """Generate the worlds of a split of the built-in data, with their questions, and index their passages."""
    is_train = split == "train"
    worlds = data.train_worlds if is_train else data.held_out_worlds
    wiki = generate(split, data.seed, worlds * data.world_size, worlds)
    per_kind = data.train_per_kind if is_train else data.held_out_per_kind
    questions = mixed_questions(wiki, per_kind, data.kinds, data.seed)
    log(
        f"miniwiki {split}: {worlds} worlds, {len(wiki.passages)} passages, {len(questions)} questions; indexing"
    )
    search_retriever = load_retriever(wiki.passages, retriever, encoder, workdir=workdir)
    return SearchDataset([item.question for item in questions], search_retriever, wiki.passages)


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
