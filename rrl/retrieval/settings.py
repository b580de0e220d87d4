"""What an encoder's folder says about texts: prefixes, widths and pooling; and what the known families want."""

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
"""The {task} of an instruction where none is given: that of the model card of multilingual-e5-large-instruct."""


@dataclasses.dataclass(frozen=True, slots=True)
class TextFamily:
    """What the encoders of one family want."""

    query_prefix: str
    """{task} in it stands for a setting of its own."""
    passage_prefix: str
    pooling: str
    """Where modules.json does not tell it."""
    folders: str
    """Regular expression over the published names of its models, in lower case."""


TEXT_FAMILIES = {
    # E5 (Wang et al. 2022), with which R-Search and R3-RAG search.
    "e5": TextFamily("query: ", "passage: ", "mean", r"(multilingual-)?e5-(small|base|large)(-v2)?"),
    # multilingual-e5-large-instruct (Wang et al. 2024), R2AG's.
    "e5-instruct": TextFamily("Instruct: {task}\nQuery: ", "", "mean", r"multilingual-e5-large-instruct"),
    # BGE (Xiao et al. 2023), R3-RAG's second.
    "bge-en-v1.5": TextFamily(
        "Represent this sentence for searching relevant passages: ",
        "",
        "cls",
        r"bge-(small|base|large)-en-v1\.5",
    ),
    "minilm": TextFamily("", "", "mean", r"(all|paraphrase|multi-qa)-minilm-l\d+(-cos)?-v\d"),
}
"""By the name that `family` in text_encoder.json takes."""


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """How texts become token ids; kept in the encoder's folder as `text_encoder.json`."""

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
class FolderSettings:
    """How an encoder's folder wants its texts."""

    text: TextSettings
    pooling: Pooling
    lower_case: bool = False
    """Whether texts are lowered before the tokenizer sees them."""
    derived: bool = False
    """Whether more than text_encoder.json went into this."""


def read_settings(folder: Path, given: Mapping[str, Any] | None = None) -> FolderSettings:
    """Finds out how a folder's encoder wants its texts, and logs it.

    text_encoder.json holds the fields of TextSettings, `pooling` (mean or cls), `normalize`, and `family` (a key of
    TEXT_FAMILIES, with its `task`) in place of prefixes; `given` holds the same keys and is stronger. What these leave
    out comes from sentence-transformers' files and from the family, which may be told by the folder's name; with
    neither, from the defaults of TextSettings and Pooling.

    Raises:
        UserError: nothing tells the prefixes; an unknown key or value; what sentence-transformers' files ask for is
            not supported.
    """
    file = folder / SETTINGS_FILE
    values = (read_json(file, "") if file.is_file() else {}) | dict(given or {})
    where = f"settings given for {folder}" if given else str(file)
    family, task = values.pop("family", None), values.pop("task", None)
    if family is not None and family not in TEXT_FAMILIES:
        raise UserError(f"{where}: family={family!r} is unknown; choose one of {', '.join(TEXT_FAMILIES)}")
    if unknown := values.keys() - _KEYS:
        raise UserError(
            f"{where}: {', '.join(sorted(unknown))} unknown. Allowed: {', '.join(_KEYS)}, family, task"
        )
    own = PREFIXES.keys() <= values.keys() and family is None and not (folder / MODULES_FILE).is_file()
    found, source, certain = ({}, where, True) if own else _deduce(folder, values, family)
    values = found | values
    defaults = Pooling()
    mode, normalize = values.pop("pooling", defaults.mode), values.pop("normalize", defaults.normalize)
    lower_case = values.pop("lower_case", False)
    try:
        text, pooling = TextSettings(**values), Pooling(mode, normalize)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if task is not None and "{task}" not in text.query_prefix:
        raise UserError(
            f"{where}: task={task!r} has no place in query_prefix={text.query_prefix!r}; put {{task}} there"
        )
    prefix = text.query_prefix.replace("{task}", str(task or SEARCH_TASK))
    text = dataclasses.replace(text, query_prefix=prefix)
    logging.getLogger(__name__).log(
        logging.INFO if certain else logging.WARNING,
        "encoder %s: prefixes %r and %r (%s); %s pooling, %s; at most %d tokens a query, %d a passage",
        folder,
        text.query_prefix,
        text.passage_prefix,
        source,
        pooling.mode,
        "unit length" if pooling.normalize else "not normalised: inner products rank, not cosines",
        text.query_tokens,
        text.passage_tokens,
    )
    return FolderSettings(text, pooling, lower_case, derived=bool(given) or not own)


def _deduce(folder: Path, values: Mapping[str, Any], family: str | None) -> tuple[dict[str, Any], str, bool]:
    """What `values` may leave out, where the prefixes come from, and whether that is certain."""
    modules = (folder / MODULES_FILE).is_file()
    stated = read_sentence_transformers(folder) if modules else {}
    guess = next((name for name in TEXT_FAMILIES if _has_name_of(folder, name)), None)
    chosen = TEXT_FAMILIES.get(family or guess or "")
    wanted: dict[str, Any] = {}
    if PREFIXES.keys() <= values.keys():
        source, certain = "as set", True
    elif family is None and PREFIXES.keys() <= stated.keys():
        source, certain = "the prompts of its sentence-transformers files", True
    elif chosen:
        wanted = {"query_prefix": chosen.query_prefix, "passage_prefix": chosen.passage_prefix}
        source, certain = (
            f"family {family}" if family else f"family {guess}, by the folder's name",
            bool(family),
        )
    elif modules:
        wanted = dict.fromkeys(PREFIXES, "")
        source, certain = f"no file tells any; if it wants some, add {_EXAMPLE}", False
    else:
        raise UserError(
            f"encoder folder {folder}: no {SETTINGS_FILE} with its prefixes (query_prefix, passage_prefix), and no "
            f"{MODULES_FILE} of sentence-transformers. Add {_EXAMPLE}, or give another folder."
        )
    base = {"pooling": chosen.pooling} if chosen else {}
    return base | text_lengths(folder) | stated | wanted, source, certain


_EXAMPLE = f'a {SETTINGS_FILE} such as {{"family": "e5"}} (families: {", ".join(TEXT_FAMILIES)})'


def _has_name_of(folder: Path, family: str) -> bool:
    """Whether the folder, or the one around it in a Hugging Face cache, has the name of a model of the family."""
    parts = folder.absolute().parts
    names = [parts[-1], *(part.rpartition("--")[2] for part in parts if part.startswith("models--"))]
    return any(re.fullmatch(TEXT_FAMILIES[family].folders, name.lower()) for name in names)
