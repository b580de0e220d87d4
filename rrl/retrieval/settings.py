"""Read the text settings and the pooling of an encoder from its folder, with defaults for known model families.

Read `read_settings` first.
"""

import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rrl.errors import UserError, at_least
from rrl.models.config import Pooling
from rrl.models.weights import read_json
from rrl.retrieval.sentence_transformers import (
    MODULES_FILE,
    PREFIXES,
    read_sentence_transformers,
    text_lengths,
)

SETTINGS_FILE = "text_encoder.json"

SEARCH_TASK = "Given a web search query, retrieve relevant passages that answer the query"
"""The default {task} of an instruction, from the model card of multilingual-e5-large-instruct."""


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderFamily:
    """The prefixes and pooling of one family of encoders."""

    query_prefix: str
    """{task} in it is replaced by the setting `task`."""
    passage_prefix: str
    pooling: str
    """Used if there is no modules.json."""
    model_names: str
    """Regular expression over the published names of its models, in lower case."""


ENCODER_FAMILIES = {
    # E5 (Wang et al. 2022), the retriever of R-Search and R3-RAG.
    "e5": EncoderFamily("query: ", "passage: ", "mean", r"(multilingual-)?e5-(small|base|large)(-v2)?"),
    # multilingual-e5-large-instruct (Wang et al. 2024), the retriever of R2AG.
    "e5-instruct": EncoderFamily("Instruct: {task}\nQuery: ", "", "mean", r"multilingual-e5-large-instruct"),
    # BGE (Xiao et al. 2023), the second retriever of R3-RAG.
    "bge-en-v1.5": EncoderFamily(
        "Represent this sentence for searching relevant passages: ",
        "",
        "cls",
        r"bge-(small|base|large)-en-v1\.5",
    ),
    "minilm": EncoderFamily("", "", "mean", r"(all|paraphrase|multi-qa)-minilm-l\d+(-cos)?-v\d"),
}
"""Families by the value of `family` in text_encoder.json."""


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """How texts become token ids; stored in the encoder's folder as `text_encoder.json`."""

    query_prefix: str = "query: "
    passage_prefix: str = "passage: "
    query_tokens: int = 32
    """Fixed width of tokenised queries; longer ones are cut."""
    passage_tokens: int = 128
    """Passages are cut at this many tokens."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("query_prefix", str),
            ("passage_prefix", str),
            ("query_tokens", int),
            ("passage_tokens", int),
        ):
            if type(value := getattr(self, name)) is not kind:
                raise UserError(f"{name}={value!r} must be a {'string' if kind is str else 'whole number'}")
        at_least(1, self, "query_tokens", "passage_tokens")


_KEYS = (*(field.name for field in dataclasses.fields(TextSettings)), "pooling", "normalize", "lower_case")


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """Text settings and pooling of an encoder, resolved from all files of its folder."""

    text: TextSettings
    pooling: Pooling
    lower_case: bool = False
    """Whether texts are lower-cased before the tokenizer."""
    derived: bool = False
    """Whether some settings come from sentence-transformers' files, a family or the caller, and not from text_encoder.json."""


def read_settings(folder: Path, given: Mapping[str, Any] | None = None) -> EncoderSettings:
    """Resolve the settings of a folder's encoder, and log them.

    text_encoder.json holds the fields of TextSettings, `pooling` (mean or cls), `normalize`, `lower_case`, and `family` (a key of
    ENCODER_FAMILIES, with its `task`) in place of prefixes. `given` has the same keys and overrides the file. A key that is
    missing from both is looked up in this order: the files of sentence-transformers; for `query_tokens` and `passage_tokens`, the
    model's config and tokenizer (`text_lengths`); for prefixes and pooling, the family (the given one, or the one whose models
    have the folder's name); the defaults of TextSettings and Pooling. Two exceptions:
    - the prefixes of a given family take precedence over those in the files of sentence-transformers;
    - if both prefixes are given, and there is neither a `family` nor a modules.json, missing keys have their defaults, whatever
      the folder's name.

    Raises:
        UserError: the prefixes are unknown, a key or value is unknown, or the files of sentence-transformers ask for something
            that is not supported.
    """
    file = folder / SETTINGS_FILE
    values = (read_json(file, "") if file.is_file() else {}) | dict(given or {})
    where = f"settings given for {folder}" if given else str(file)
    family, task = values.pop("family", None), values.pop("task", None)
    if family is not None and family not in ENCODER_FAMILIES:
        raise UserError(f"{where}: family={family!r} is unknown; choose one of {', '.join(ENCODER_FAMILIES)}")
    if unknown := values.keys() - _KEYS:
        raise UserError(
            f"{where}: {', '.join(sorted(unknown))} unknown. Allowed: {', '.join(_KEYS)}, family, task"
        )
    # Whether text_encoder.json and `given` determine all settings, without other files or a family.
    complete = PREFIXES.keys() <= values.keys() and family is None and not (folder / MODULES_FILE).is_file()
    derived, source, is_certain = ({}, where, True) if complete else _derive(folder, values, family)
    values = derived | values
    defaults = Pooling()
    mode, normalize = values.pop("pooling", defaults.mode), values.pop("normalize", defaults.normalize)
    lower_case = values.pop("lower_case", False)
    try:
        text, pooling = TextSettings(**values), Pooling(mode, normalize)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if task is not None and "{task}" not in text.query_prefix:
        raise UserError(
            f"{where}: task={task!r} is not used by query_prefix={text.query_prefix!r}; put {{task}} into the prefix"
        )
    prefix = text.query_prefix.replace("{task}", str(task or SEARCH_TASK))
    text = dataclasses.replace(text, query_prefix=prefix)
    logging.getLogger(__name__).log(
        logging.INFO if is_certain else logging.WARNING,
        "encoder %s: prefixes %r and %r (%s); %s pooling, %s; at most %d tokens per query, %d per passage",
        folder,
        text.query_prefix,
        text.passage_prefix,
        source,
        pooling.mode,
        "unit length" if pooling.normalize else "not normalised: ranked by inner product, not cosine",
        text.query_tokens,
        text.passage_tokens,
    )
    return EncoderSettings(text, pooling, lower_case, derived=bool(given) or not complete)


def _derive(folder: Path, values: Mapping[str, Any], family: str | None) -> tuple[dict[str, Any], str, bool]:
    """Derive settings from the files of sentence-transformers and the model family.

    Returns the settings, a description of the source of the prefixes, and whether the prefixes are certain. They are not if they
    follow from the folder's name, or if they are empty because no file gives any.
    """
    modules = (folder / MODULES_FILE).is_file()
    from_files = read_sentence_transformers(folder) if modules else {}
    guess = next((name for name in ENCODER_FAMILIES if _is_named_after(folder, name)), None)
    chosen = ENCODER_FAMILIES.get(family or guess or "")
    prefixes: dict[str, Any] = {}
    if PREFIXES.keys() <= values.keys():
        source, is_certain = "as given", True
    elif family is None and PREFIXES.keys() <= from_files.keys():
        source, is_certain = "the prompts of its sentence-transformers files", True
    elif chosen:
        prefixes = {"query_prefix": chosen.query_prefix, "passage_prefix": chosen.passage_prefix}
        source, is_certain = (
            f"family {family}" if family else f"family {guess}, by the folder's name",
            bool(family),
        )
    elif modules:
        prefixes = dict.fromkeys(PREFIXES, "")
        source, is_certain = f"no file gives prefixes; if the model needs some, add {_EXAMPLE}", False
    else:
        raise UserError(
            f"encoder folder {folder}: no {SETTINGS_FILE} with its prefixes (query_prefix, passage_prefix), and no "
            f"{MODULES_FILE} of sentence-transformers. Add {_EXAMPLE}, or give another folder."
        )
    base = {"pooling": chosen.pooling} if chosen else {}
    return base | text_lengths(folder) | from_files | prefixes, source, is_certain


_EXAMPLE = f'a {SETTINGS_FILE} such as {{"family": "e5"}} (families: {", ".join(ENCODER_FAMILIES)})'


def _is_named_after(folder: Path, family: str) -> bool:
    """Return whether the folder, or its model's folder in a Hugging Face cache, is named after a model of the family."""
    parts = folder.absolute().parts
    names = [parts[-1], *(part.rpartition("--")[2] for part in parts if part.startswith("models--"))]
    return any(re.fullmatch(ENCODER_FAMILIES[family].model_names, name.lower()) for name in names)
