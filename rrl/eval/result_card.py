"""What a result must say of itself to be compared: corpus, retriever, limits, model, judge, seed, versions, command.

Two results over other passages, or with another retriever, are not two rows of one table, unless the table says so:
`launch/report.py` always does (`differences`).
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import subprocess
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rrl.data.questions import Question
from rrl.errors import UserError, at_least
from rrl.files import CHECKOUT, atomic_stream

PACKAGES = ("jax", "flax", "numpy", "transformers", "scann", "bm25s")

BM25 = ("k1", "b", "title_weight")
"""Settings of a retriever that only a search by words has."""

SETTING: Mapping[str, tuple[str, ...]] = {
    "corpus": ("corpus_sha256", "passages"),
    "retriever": ("searched_by",),
    "passages of a search": ("top_k",),
    "questions": ("questions_sha256", "questions"),
    "normalisation": ("normalization",),
}
"""What must be the same in two rows that are compared, in words, and the fields that tell. Model, method, limits and seed are
what rows are compared in."""

KNOWN: Mapping[str, tuple[str, ...]] = {
    "judge": ("judge",),
    "gold passages": ("gold_sha256",),
    "numerics": ("compute",),
}
"""As `SETTING`, of what must be the same among those rows that have it at all."""


@dataclasses.dataclass(frozen=True)
class ResultCard:
    """How one result came about."""

    method: str
    """The recipe or prompted method, with what was set in it."""
    dataset: str
    questions: int
    questions_sha256: str
    """`questions_fingerprint`."""
    corpus: str
    """Name or file of the corpus; "" where nothing is searched."""
    corpus_sha256: str
    """`rrl.data.passages.fingerprint`, as an index's manifest has it; "" where nothing is searched."""
    passages: int
    """In the corpus."""
    retriever: Mapping[str, Any]
    """What decides what is found: kind, encoder with its hash, settings. Empty where nothing is searched."""
    top_k: int
    """Passages that a search returns."""
    limits: Mapping[str, int]
    """Most searches, turns, tokens of a turn, of an observation, of the context, ..."""
    model: str
    """Folder or name of the policy."""
    model_sha256: str
    """`rrl.models.weights.folder_hash`; "" for a model that is only known by an endpoint's name."""
    normalization: str
    """A name of `rrl.text.normalize.RULES`."""
    reader: str = ""
    """Folder of the model that answered from what was found (R2AG's generator); "" where the policy answers itself."""
    reader_sha256: str = ""
    """As `model_sha256`."""
    judge: str = ""
    """The model that judged correctness, with its hash, and whether EM and F1 are of short forms that it extracted; "" where none
    did."""
    temperature: float = 0.0
    seed: int = 0
    gold_sha256: str = ""
    """`gold_fingerprint`, by which recall is measured; "" where no question has gold passages, and on older cards."""
    compute: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Precision and attention backend, on which a greedy choice between near tokens depends; empty on older cards."""
    commit: str = ""
    """`commit_here` of the code that answered; several, where a run was continued by another."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """`versions_here`, of when the last question was answered."""
    command: str = ""
    """The command that makes the result again."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), typing.get_origin(field.type) or field.type
            allowed: Any = (int, float) if kind is float else kind
            if isinstance(value, bool) or not isinstance(value, allowed):
                raise UserError(f"{field.name}={value!r} must be {_WORDS[kind]}")
        at_least(0, self, "questions", "passages", "top_k", "temperature", "seed")
        if not self.method or not self.dataset:
            raise UserError(f"method={self.method!r} and dataset={self.dataset!r} must not be empty")
        if bool(self.corpus) != bool(self.retriever):
            raise UserError(
                f"corpus={self.corpus!r} and retriever={dict(self.retriever)} belong together: both, or neither where nothing "
                "is searched"
            )

    @property
    def models(self) -> dict[str, str]:
        """The policy and, where there is one, the reader, in words, each with its hash."""
        found = {"model": f"{self.model} ({self.model_sha256[:12]})"}
        return found | ({"reader": f"{self.reader} ({self.reader_sha256[:12]})"} if self.reader else {})

    @property
    def judged(self) -> str:
        """The judge in words; "none" where none did."""
        try:
            told = json.loads(self.judge)
        except ValueError:
            return self.judge or "none"
        return _told(told) if isinstance(told, dict) else self.judge

    @property
    def _known(self) -> dict[str, str]:
        """The values of `KNOWN` in words."""
        return {
            "judge": self.judged,
            "gold passages": self.gold_sha256[:12],
            "numerics": _told(self.compute),
        }

    @property
    def searched_by(self) -> dict[str, Any]:
        """The settings of the retriever that have a meaning: of a search by embeddings those of BM25 have none, but that a title
        weight of 0 says that texts are embedded without their titles."""
        if self.retriever.get("kind") not in ("exact", "scann"):
            return dict(self.retriever)
        return {
            name: value
            for name, value in self.retriever.items()
            if name not in BM25 or (name == "title_weight" and value == 0)
        }

    @property
    def setting(self) -> dict[str, str]:
        """The values of `SETTING` in words: two cards may stand in one table without a remark where these are equal."""
        inside = f"{self.passages:,} passages, {self.corpus_sha256[:12]}" if self.corpus_sha256 else UNKNOWN
        searched = f"{self.corpus} ({inside})" if self.corpus else "none"
        return {
            "corpus": searched,
            "retriever": _told(self.searched_by) or "none",
            "passages of a search": str(self.top_k) if self.corpus else "none",
            "questions": f"{self.dataset} ({self.questions:,}, {self.questions_sha256[:12]})",
            "normalisation": self.normalization,
        }


UNKNOWN = "its service does not say what it holds"


def _told(values: Mapping[str, Any]) -> str:
    """What is set, in words."""
    parts = (
        f"{name.replace('_', ' ')} " + (f"({_told(value)})" if isinstance(value, Mapping) else str(value))
        for name, value in sorted(values.items())
        if value not in ("", None)
    )
    return ", ".join(parts)


_WORDS: Mapping[Any, str] = {str: "text", int: "a whole number", float: "a number", Mapping: "a mapping"}


def questions_fingerprint(questions: Sequence[Question]) -> str:
    """SHA-256 over ids, texts, gold answers and choices in order."""
    digest = hashlib.sha256()
    for question in questions:
        told = [
            question.id,
            question.text,
            question.answers,
            *([question.choices] if question.choices else []),
        ]
        digest.update(json.dumps(told).encode())
    return digest.hexdigest()


def gold_fingerprint(questions: Sequence[Question]) -> str:
    """SHA-256 over gold passages in order; "" where no question has any."""
    titles, ids = ([getattr(question, name) for question in questions] for name in ("gold", "gold_ids"))
    gold = [titles, ids] if any(ids) else titles
    return hashlib.sha256(json.dumps(gold).encode()).hexdigest() if any(titles) or any(ids) else ""


def versions_here() -> dict[str, str]:
    """Versions of Python, rrl and what results depend on, as installed."""
    found = {"python": platform.python_version()}
    for name in ("rrl", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit_here() -> str:
    """The commit of rrl that is checked out, with a mark where what is run differs from it; "unknown" outside a clone."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    # An installed package may lie in a clone of something else.
    if not commit or Path(_git("rev-parse", "--show-toplevel")) != CHECKOUT:
        return "unknown"
    return commit + (
        " with changes"
        if _git("status", "--porcelain", "--untracked-files=no", "rrl", "launch", "configs", "assets")
        else ""
    )


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(CHECKOUT), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def save_card(file: str | Path, card: ResultCard) -> None:
    """Writes the card as JSON; the file is there only when it is whole."""
    with atomic_stream(Path(file)) as stream:
        stream.write((json.dumps(dataclasses.asdict(card), indent=2, ensure_ascii=False) + "\n").encode())


def load_card(file: str | Path) -> ResultCard:
    """Reads what `save_card` wrote; UserError for a file that is no card, naming the field."""
    try:
        return card_of(json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"result card {file}: {error}") from error


def card_of(fields: Any) -> ResultCard:
    """The card of a decoded JSON object; UserError names a field that is missing, unknown or of the wrong type."""
    if not isinstance(fields, dict):
        raise UserError(f"got {fields!r:.60}, not an object with the fields of a result card")
    known = {
        field.name: field.default is field.default_factory is dataclasses.MISSING
        for field in dataclasses.fields(ResultCard)
    }
    unknown = [name for name in fields if name not in known]
    missing = [name for name, required in known.items() if required and name not in fields]
    if unknown or missing:
        said = [f"unknown: {', '.join(unknown)}"] * bool(unknown) + [f"missing: {', '.join(missing)}"] * bool(
            missing
        )
        raise UserError(f"{'; '.join(said)}; the fields are {', '.join(known)}")
    return ResultCard(**fields)


def differences(cards: Mapping[str, ResultCard]) -> list[str]:
    """One line for each part of the setting in which cards differ, with who has what; empty where they may be compared.

    What is in `KNOWN` is compared among those cards that have it; judges among all where EM and F1 are of short forms that one
    extracted.
    """
    lines = []
    shortened = any('"short_answers": true' in card.judge for card in cards.values())
    for part, fields in {**SETTING, **KNOWN}.items():
        groups: dict[str, list[str]] = {}
        shown: dict[str, str] = {}
        for name, card in cards.items():
            values = [_plain(getattr(card, field)) for field in fields]
            if part in KNOWN and not any(values) and not (part == "judge" and shortened):
                continue
            key = json.dumps(values, sort_keys=True)
            groups.setdefault(key, []).append(name)
            shown[key] = {**card.setting, **card._known}[part]
        if len(groups) > 1:
            lines.append(
                f"{part} differs: "
                + "; ".join(f"{', '.join(who)}: {shown[key]}" for key, who in groups.items())
            )
    return lines


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
