"""A data folder: which of its files are questions of which split, and which is the corpus."""

import dataclasses
from pathlib import Path

from rrl.data.passages import Passage, load_passages
from rrl.data.questions import Question, load_questions
from rrl.data.records import OnError
from rrl.errors import UserError

SPLITS = ("train", "dev", "test", "questions")
CORPORA = ("corpus", "passages")
CONTAINERS = (".json", ".jsonl", ".tsv")


@dataclasses.dataclass(frozen=True)
class DataFolder:
    """Questions by split, and the passages they are asked about."""

    passages: list[Passage]
    splits: dict[str, list[Question]]
    """Keys are those of `SPLITS` that were found."""
    files: dict[str, Path]
    """The question file of each."""


def load_folder(path: str | Path, on_error: OnError = "refuse", corpus: bool = True) -> DataFolder:
    """Read a folder with one corpus (`corpus*`, `passages*`, `*_corpus*`) and question files named by split.

    Without `corpus`, for those who bring an index, none is needed and none is read.

    Raises UserError that lists the files found if there is no corpus, no questions, or two files for one of them.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(
            f"data folder {folder}: not a folder. Give a folder that holds a corpus and question files."
        )
    corpora, splits = _sorted_out(folder)
    problems = []
    if corpus and len(corpora) != 1:
        problems.append(
            f"{len(corpora)} corpus files, where one is needed (named {', '.join(CORPORA)} + anything)"
        )
    if not splits:
        problems.append(f"no question file (named {', '.join(SPLITS)} + anything)")
    problems += [
        f"{len(files)} files for the split {name!r}" for name, files in splits.items() if len(files) > 1
    ]
    if problems:
        found = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        raise UserError(
            f"data folder {folder}: {'; '.join(problems)}. Found: {found}. "
            f"Allowed endings: {', '.join(CONTAINERS)}, each with or without .gz."
        )
    return DataFolder(
        load_passages(corpora[0], on_error) if corpus else [],
        {name: load_questions(files[0], on_error) for name, files in splits.items()},
        {name: files[0] for name, files in splits.items()},
    )


def _sorted_out(folder: Path) -> tuple[list[Path], dict[str, list[Path]]]:
    corpora: list[Path] = []
    splits: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        name = file.name.removesuffix(".gz")
        stem, _, ending = name.rpartition(".")
        if f".{ending}" not in CONTAINERS or not file.is_file():
            continue
        if stem.startswith(CORPORA) or stem.endswith(tuple(f"_{word}" for word in CORPORA)):
            corpora.append(file)
        elif split := next((split for split in SPLITS if stem.startswith(split)), None):
            splits.setdefault(split, []).append(file)
    return corpora, splits
