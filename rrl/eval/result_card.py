"""Result cards: the setting of an evaluation (corpus, retriever, limits, model, judge, seed, versions, command).

Two results over different corpora or retrievers belong in one table only with a note. `launch/report.py` adds these notes
(`differences`). Read `ResultCard` first.
"""

import dataclasses
import hashlib
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rrl.data.questions import Question
from rrl.errors import UserError, at_least
from rrl.files import atomic_stream

BM25_FIELDS = ("k1", "b", "title_weight")
"""Settings of a retriever that only BM25 has."""

COMPARED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "corpus": ("corpus_sha256", "passages"),
    "retriever": ("retriever_settings",),
    "passages of a search": ("top_k",),
    "questions": ("questions_sha256", "questions"),
    "normalisation": ("normalization",),
}
"""Settings that are equal in comparable results: name of the setting -> fields of the card. Model, method, limits and seed are
not among them, because a comparison varies these."""

OPTIONAL_COMPARED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "judge": ("judge",),
    "gold passages": ("gold_sha256",),
    "numerics": ("compute",),
    "numerics of the policy": ("policy_format",),
    "numerics of the reader": ("reader_format",),
}
"""Further settings that are equal in comparable results, if the results have them: name of the setting -> fields of the card."""


@dataclasses.dataclass(frozen=True)
class ResultCard:
    """The setting in which one result was measured."""

    method: str
    """The recipe or prompted method, with the options that differ from their defaults."""
    dataset: str
    questions: int
    questions_sha256: str
    """`questions_fingerprint`."""
    corpus: str
    """Name or file of the corpus; "" if nothing is searched."""
    corpus_sha256: str
    """`rrl.data.passages.fingerprint`, as in an index's manifest; "" if nothing is searched, or if a search service does
    not identify its corpus."""
    passages: int
    """Number of passages in the corpus; 0 if nothing is searched, or if it is not known."""
    retriever: Mapping[str, Any]
    """Settings that determine the hits: kind, hash of the encoder, parameters of BM25, address of a search service. Empty if
    nothing is searched."""
    top_k: int
    """Number of passages that a search returns."""
    limits: Mapping[str, int]
    """Limits of searches, turns, and of tokens of a turn, an observation and the context."""
    model: str
    """Folder or name of the policy."""
    model_sha256: str
    """`rrl.models.weights.folder_hash`; "" for a model behind an endpoint."""
    normalization: str
    """A name of `rrl.text.normalize.RULES`."""
    reader: str = ""
    """Folder of the model that answered from the retrieved passages (R2AG's generator); "" if the policy answers itself."""
    reader_sha256: str = ""
    """Hash of the reader, as `model_sha256`."""
    judge: str = ""
    """JSON of the model that judged correctness, with its hash, and of whether EM and F1 are computed on short forms that it
    extracted; "" if there was no judge."""
    temperature: float = 0.0
    seed: int = 0
    gold_sha256: str = ""
    """`gold_fingerprint` of the gold passages, for recall; "" if no question has any, and on older cards."""
    compute: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Precision and attention backend, which can change greedy decoding if two logits are nearly equal; empty on older cards."""
    policy_format: str = ""
    """Number format of the policy's matrix products (`rrl.rollout.engine.Engine.product_format`); several if the run continued in
    another one; "" on older cards."""
    reader_format: str = ""
    """Number format of the reader's, as `policy_format`; "" without a reader."""
    commit: str = ""
    """`rrl.eval.provenance.current_commit` of the code that answered; several if another commit continued the run."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """`rrl.eval.provenance.installed_versions` when the last question was answered."""
    command: str = ""
    """The command that reproduces the result."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), typing.get_origin(field.type) or field.type
            allowed: Any = (int, float) if kind is float else kind
            if isinstance(value, bool) or not isinstance(value, allowed):
                raise UserError(f"{field.name}={value!r} must be {_TYPE_NAMES[kind]}")
        at_least(0, self, "questions", "passages", "top_k", "temperature", "seed")
        if not self.method or not self.dataset:
            raise UserError(f"method={self.method!r} and dataset={self.dataset!r} must not be empty")
        if bool(self.corpus) != bool(self.retriever):
            raise UserError(
                f"corpus={self.corpus!r} and retriever={dict(self.retriever)} must both be set, or both be empty if nothing is "
                "searched"
            )

    @property
    def models(self) -> dict[str, str]:
        """The policy and, if there is one, the reader, as text, each with its hash."""
        models = {"model": f"{self.model} ({self.model_sha256[:12]})"}
        return models | ({"reader": f"{self.reader} ({self.reader_sha256[:12]})"} if self.reader else {})

    @property
    def judge_text(self) -> str:
        """The judge, as text; "none" if there was none."""
        try:
            judge = json.loads(self.judge)
        except ValueError:
            return self.judge or "none"
        return _as_text(judge) if isinstance(judge, dict) else self.judge

    @property
    def _optional_settings(self) -> dict[str, str]:
        """Values of `OPTIONAL_COMPARED_FIELDS`, as text."""
        return {
            "judge": self.judge_text,
            "gold passages": self.gold_sha256[:12],
            "numerics": _as_text(self.compute),
            "numerics of the policy": self.policy_format,
            "numerics of the reader": self.reader_format,
        }

    @property
    def retriever_settings(self) -> dict[str, Any]:
        """The settings that the retriever uses.

        A search by embeddings ignores `BM25_FIELDS`, but `title_weight` 0 means that passages are embedded without titles.
        """
        if self.retriever.get("kind") not in ("exact", "scann"):
            return dict(self.retriever)
        return {
            name: value
            for name, value in self.retriever.items()
            if name not in BM25_FIELDS or (name == "title_weight" and value == 0)
        }

    @property
    def setting(self) -> dict[str, str]:
        """Values of `COMPARED_FIELDS`, as text, for tables."""
        size_and_hash = (
            f"{self.passages:,} passages, {self.corpus_sha256[:12]}" if self.corpus_sha256 else UNKNOWN_CORPUS
        )
        corpus = f"{self.corpus} ({size_and_hash})" if self.corpus else "none"
        return {
            "corpus": corpus,
            "retriever": _as_text(self.retriever_settings) or "none",
            "passages of a search": str(self.top_k) if self.corpus else "none",
            "questions": f"{self.dataset} ({self.questions:,}, {self.questions_sha256[:12]})",
            "normalisation": self.normalization,
        }


UNKNOWN_CORPUS = "the search service does not identify its corpus"


def _as_text(values: Mapping[str, Any]) -> str:
    """Return the settings that are not empty, as text: "name value, name value"."""
    parts = (
        f"{name.replace('_', ' ')} " + (f"({_as_text(value)})" if isinstance(value, Mapping) else str(value))
        for name, value in sorted(values.items())
        if value not in ("", None)
    )
    return ", ".join(parts)


_TYPE_NAMES: Mapping[Any, str] = {str: "text", int: "a whole number", float: "a number", Mapping: "a mapping"}


def questions_fingerprint(questions: Sequence[Question]) -> str:
    """Return a SHA-256 over ids, texts, gold answers and choices, in order."""
    digest = hashlib.sha256()
    for question in questions:
        content = [
            question.id,
            question.text,
            question.answers,
            *([question.choices] if question.choices else []),
        ]
        digest.update(json.dumps(content).encode())
    return digest.hexdigest()


def gold_fingerprint(questions: Sequence[Question]) -> str:
    """Return a SHA-256 over gold passages, in order; "" if no question has any."""
    titles, ids = ([getattr(question, name) for question in questions] for name in ("gold", "gold_ids"))
    gold = [titles, ids] if any(ids) else titles
    return hashlib.sha256(json.dumps(gold).encode()).hexdigest() if any(titles) or any(ids) else ""


def save_card(file: str | Path, card: ResultCard) -> None:
    """Write the card as JSON, atomically."""
    with atomic_stream(Path(file)) as stream:
        stream.write((json.dumps(dataclasses.asdict(card), indent=2, ensure_ascii=False) + "\n").encode())


def load_card(file: str | Path) -> ResultCard:
    """Read a card. Raises UserError, with the field, if the file is not a result card."""
    try:
        return card_from_json(json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"result card {file}: {error}") from error


def card_from_json(fields: Any) -> ResultCard:
    """Return the card of a decoded JSON object. Raises UserError for a missing or unknown field, or a wrong type."""
    if not isinstance(fields, dict):
        raise UserError(f"got {fields!r:.60}, not an object with the fields of a result card")
    is_required = {
        field.name: field.default is field.default_factory is dataclasses.MISSING
        for field in dataclasses.fields(ResultCard)
    }
    unknown = [name for name in fields if name not in is_required]
    missing = [name for name, required in is_required.items() if required and name not in fields]
    faults = [
        f"{what}: {', '.join(names)}" for what, names in (("unknown", unknown), ("missing", missing)) if names
    ]
    if faults:
        raise UserError(f"{'; '.join(faults)}; the fields are {', '.join(is_required)}")
    return ResultCard(**fields)


def differences(cards: Mapping[str, ResultCard]) -> list[str]:
    """Return a line for each setting in which cards differ, with the value of each card; [] if the cards are comparable.

    `OPTIONAL_COMPARED_FIELDS` are compared only among the cards that have them, with one exception: if the EM and F1 of any card
    are computed on short forms that a judge extracted, the judge is compared among all cards.
    """
    lines = []
    judge_sets_scores = any('"short_answers": true' in card.judge for card in cards.values())
    for setting, fields in {**COMPARED_FIELDS, **OPTIONAL_COMPARED_FIELDS}.items():
        optional = setting in OPTIONAL_COMPARED_FIELDS and not (setting == "judge" and judge_sets_scores)
        names_by_value: dict[str, list[str]] = {}
        text_of: dict[str, str] = {}
        for name, card in cards.items():
            values = [getattr(card, field) for field in fields]
            if optional and not any(values):
                continue
            key = json.dumps(values, sort_keys=True, default=dict)
            names_by_value.setdefault(key, []).append(name)
            text_of[key] = {**card.setting, **card._optional_settings}[setting]
        if len(names_by_value) > 1:
            groups = (f"{', '.join(names)}: {text_of[key]}" for key, names in names_by_value.items())
            lines.append(f"{setting} differs: {'; '.join(groups)}")
    return lines
