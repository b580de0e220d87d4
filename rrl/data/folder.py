"""Read a data folder: find its corpus and the question files of each split. Read `load_folder` first."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from rrl.data.decoding import COMPRESSED_ENDINGS, decompressed_name
from rrl.data.passages import Passage, load_passages
from rrl.data.questions import Question, lacks_answers, load_questions
from rrl.data.records import OnError
from rrl.errors import UserError

SPLITS = ("train", "dev", "test", "questions")
"""A file whose name begins with one of these holds the questions of that split."""
CORPUS_NAMES = ("corpus", "passages")
"""Names of a corpus file: `corpus*`, `passages*`, or `*_corpus` and `*_passages` before the ending."""
DATA_ENDINGS = (".json", ".jsonl", ".tsv", ".csv")
"""Endings of data files. A compressed file adds one of `COMPRESSED_ENDINGS`."""


@dataclasses.dataclass(frozen=True)
class DataFolder:
    """The passages of a folder, and its question files by split. A question file is read only when it is used."""

    path: Path
    passages: list[Passage]
    files: dict[str, list[Path]]
    """Question files of each split that the folder has; the keys are from `SPLITS`."""
    on_error: OnError = "refuse"
    """How to treat a broken question: "refuse" raises UserError for its file, "skip" skips the question."""

    def questions(self, split: str) -> list[Question]:
        """Return the questions of a split in `files`.

        Raises UserError as `load_questions`, and if the split has several files.
        """
        return load_questions(self.file(split), self.on_error)

    def file(self, split: str) -> Path:
        """Return the question file of a split in `files`. Raises UserError if the split has several files."""
        file, *more = self.files[split]
        if more:
            raise UserError(
                f"data folder {self.path}: {len(self.files[split])} files for the split {split!r} "
                f"({', '.join(one.name for one in self.files[split])}). Keep one and move the others away."
            )
        return file

    def first_split_with_answers(
        self, order: Sequence[str], exclude: str = ""
    ) -> tuple[str, list[Question]] | None:
        """Return the first split of `order` that has gold answers, and its questions; None if no split has any.

        The split `exclude` is never returned. A split without gold answers, such as the test file of many releases,
        is skipped with a warning.
        """
        for split in order:
            if split == exclude or split not in self.files:
                continue
            try:
                return split, self.questions(split)
            except UserError:
                # Only a lack of gold answers is excused. Several files or broken records are errors of the user.
                if len(self.files[split]) > 1 or not lacks_answers(self.file(split)):
                    raise
                logging.getLogger(__name__).warning(
                    "%s has no gold answers and is not used", self.file(split)
                )
        return None


def load_folder(path: str | Path, on_error: OnError = "refuse", corpus: bool = True) -> DataFolder:
    """Read a folder with one corpus (`corpus*`, `passages*`, `*_corpus`, `*_passages`) and question files named by split.

    Args:
      path: the folder.
      on_error: how to treat broken records: "refuse" raises UserError at the first one, "skip" skips them.
      corpus: whether to read the corpus. False: none is required, because the caller has an index.

    Raises:
      UserError: the folder has no corpus, several of them, or no question file; the message lists the files.
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
            f"{len(corpora)} corpus files instead of one (a name that begins with {' or '.join(CORPUS_NAMES)}, or ends with "
            f"{' or '.join(f'_{word}' for word in CORPUS_NAMES)} before the ending)"
        )
    if not files:
        problems.append(
            f"no question file (a name that begins with {', '.join(SPLITS[:-1])} or {SPLITS[-1]})"
        )
    if problems:
        names = ", ".join(sorted(file.name for file in folder.iterdir())) or "no files"
        raise UserError(
            f"data folder {folder}: {'; '.join(problems)}. Found: {names}. "
            f"Allowed endings: {', '.join(DATA_ENDINGS)}, each with or without {' or '.join(COMPRESSED_ENDINGS)}."
        )
    return DataFolder(folder, load_passages(corpora[0], on_error) if corpus else [], files, on_error)


def _classify_files(folder: Path) -> tuple[list[Path], dict[str, list[Path]]]:
    """Return the corpus files, and the question files by split."""
    corpora: list[Path] = []
    files: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        stem, _, ending = decompressed_name(file).rpartition(".")
        if f".{ending}" not in DATA_ENDINGS or not file.is_file():
            continue
        if stem.startswith(CORPUS_NAMES) or stem.endswith(tuple(f"_{word}" for word in CORPUS_NAMES)):
            corpora.append(file)
        elif split := next((split for split in SPLITS if stem.startswith(split)), None):
            files.setdefault(split, []).append(file)
    return corpora, files
