"""A data folder: which of its files are questions of which split, and which is the corpus."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from rrl.data.decoding import COMPRESSED, plain_name
from rrl.data.passages import Passage, load_passages
from rrl.data.questions import Question, has_answers, load_questions
from rrl.data.records import OnError
from rrl.errors import UserError

SPLITS = ("train", "dev", "test", "questions")
CORPUS_NAMES = ("corpus", "passages")
CONTAINER_ENDINGS = (".json", ".jsonl", ".tsv", ".csv")


@dataclasses.dataclass(frozen=True)
class DataFolder:
    """Question files by split, each read when it is asked for, and the passages they are asked about."""

    path: Path
    passages: list[Passage]
    files: dict[str, list[Path]]
    """The question files of each split that was found; keys are of `SPLITS`."""
    on_error: OnError = "refuse"
    """What a broken question does."""

    def questions(self, split: str) -> list[Question]:
        """The questions of a split that is there; errors as `load_questions`, and UserError where it has several files."""
        return load_questions(self.file(split), self.on_error)

    def file(self, split: str) -> Path:
        """The question file of a split that is there."""
        file, *more = self.files[split]
        if more:
            raise UserError(
                f"data folder {self.path}: {len(self.files[split])} files for the split {split!r} "
                f"({', '.join(one.name for one in self.files[split])}). Leave one of them there."
            )
        return file

    def first_answered(self, order: Sequence[str], exclude: str = "") -> tuple[str, list[Question]] | None:
        """The first split of `order` with gold answers that is not `but`, and its questions; None if there is none.

        A split without any gold answer, such as the test file of many releases, is passed over and logged.
        """
        for split in order:
            if split == exclude or split not in self.files:
                continue
            try:
                return split, self.questions(split)
            except UserError:
                if len(self.files[split]) > 1 or has_answers(self.file(split)):
                    raise
                logging.getLogger(__name__).warning(
                    "%s has no gold answers and is not used", self.file(split)
                )
        return None


def load_folder(path: str | Path, on_error: OnError = "refuse", corpus: bool = True) -> DataFolder:
    """Read a folder with one corpus (`corpus*`, `passages*`, `*_corpus*`) and question files named by split.

    Without `corpus`, for those who bring an index, none is needed and none is read. A question file is read when its split is
    asked for: one that is not used is not looked into.

    Raises UserError that lists the files found if there is no corpus, several, or no question file.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(
            f"data folder {folder}: not a folder. Give a folder that holds a corpus and question files."
        )
    corpora, files = _classify_files(folder)
    problems = []
    if corpus and len(corpora) != 1:
        problems.append(
            f"{len(corpora)} corpus files, where one is needed (named {', '.join(CORPUS_NAMES)} + anything)"
        )
    if not files:
        problems.append(f"no question file (named {', '.join(SPLITS)} + anything)")
    if problems:
        found = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        raise UserError(
            f"data folder {folder}: {'; '.join(problems)}. Found: {found}. "
            f"Allowed endings: {', '.join(CONTAINER_ENDINGS)}, each with or without {' or '.join(COMPRESSED)}."
        )
    return DataFolder(folder, load_passages(corpora[0], on_error) if corpus else [], files, on_error)


def _classify_files(folder: Path) -> tuple[list[Path], dict[str, list[Path]]]:
    corpora: list[Path] = []
    files: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        stem, _, ending = plain_name(file).rpartition(".")
        if f".{ending}" not in CONTAINER_ENDINGS or not file.is_file():
            continue
        if stem.startswith(CORPUS_NAMES) or stem.endswith(tuple(f"_{word}" for word in CORPUS_NAMES)):
            corpora.append(file)
        elif split := next((split for split in SPLITS if stem.startswith(split)), None):
            files.setdefault(split, []).append(file)
    return corpora, files
