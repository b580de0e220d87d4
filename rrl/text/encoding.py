"""Encode texts into token ids. Read `text_ids` first.

A question or a document may contain the text of a special token, such as "<|im_end|>". It must then be encoded as plain text.
- `text_ids` encodes the exact text; the text of a special token becomes that token.
- `plain_ids` encodes the exact text of users or documents; in it, the text of a special token is encoded as plain text.
- `template_ids` encodes the beginning of a sequence, such as the output of a chat template.
"""

import dataclasses
import json
import re
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from rrl.text.characters import replace_lone_surrogates

NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode noncharacters, which texts rarely contain. `break_special_tokens` inserts one into the text of each special token, to
mark where to split it; choose one that the text does not contain."""


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Int[np.ndarray, "T"]:
    """Return token ids whose bytes are exactly those of the text (after `replace_lone_surrogates`); adds no special tokens.

    No space is put before the text, even if the tokenizer usually adds one (SentencePiece's dummy prefix): the text may be
    appended to another text.
    """
    prefixless = _properties(tokenizer).without_prefix
    if prefixless is None:
        return template_ids(tokenizer, text)
    # Set only when it differs, because other threads may be encoding.
    if prefixless.encode_special_tokens != tokenizer.split_special_tokens:
        prefixless.encode_special_tokens = tokenizer.split_special_tokens
    return np.asarray(
        prefixless.encode(replace_lone_surrogates(text), add_special_tokens=False).ids, np.int32
    )


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Int[np.ndarray, "T"]:
    """Return token ids of the exact text of a question or a document. The texts of special tokens are encoded as plain text."""
    parts = [text_ids(tokenizer, part) for part in _parts_without_special_tokens(tokenizer, text)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def find_special_token(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return the text of the first special token in a text, such as "<|im_end|>"; "" if there is none."""
    special_tokens = _properties(tokenizer).special_tokens
    match = special_tokens.search(text) if special_tokens is not None else None
    return match[0] if match else ""


def break_special_tokens(tokenizer: PreTrainedTokenizerBase, text: str, separator: str) -> str:
    """Return the text with `separator`, one of `NONCHARACTERS`, inside the text of each special token.

    `template_ids` with the same separator then encodes them like other text.
    """
    return separator.join(_parts_without_special_tokens(tokenizer, text))


def template_ids(tokenizer: PreTrainedTokenizerBase, text: str, separator: str = "") -> Int[np.ndarray, "T"]:
    """Return the token ids of a text at the beginning of a sequence, with the tokenizer's dummy prefix if it has one.

    Texts of special tokens become special tokens, except those with `separator` inside (see `break_special_tokens`).
    """
    if separator and separator in text:
        first, *others = text.split(separator)
        return np.concatenate(
            [template_ids(tokenizer, first), *(text_ids(tokenizer, part) for part in others)]
        )
    text, backend = replace_lone_surrogates(text), getattr(tokenizer, "backend_tokenizer", None)
    # Truncation and padding of an earlier call persist in the backend; `tokenizer.encode` resets them.
    if (
        backend is None
        or backend.truncation
        or backend.padding
        or backend.encode_special_tokens != tokenizer.split_special_tokens
    ):
        return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
    # Encode in this thread: `tokenizer.encode` uses other threads, which wait for a core while rollouts occupy all of them.
    return np.asarray(backend.encode(text, add_special_tokens=False).ids, np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class _TokenizerProperties:
    """Properties of a tokenizer that are computed once."""

    vocabulary_size: int
    """Number of tokens when the properties were computed. If it has changed, tokens were added and the entry is stale."""
    without_prefix: Tokenizer | None
    """The tokenizer without its dummy prefix; None if it has no dummy prefix."""
    special_tokens: re.Pattern[str] | None
    """Matches the texts of its special tokens; None if it has none. Texts of a single character cannot be split and are
    omitted."""


_CACHE: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, _TokenizerProperties]" = (
    weakref.WeakKeyDictionary()
)


def _properties(tokenizer: PreTrainedTokenizerBase) -> _TokenizerProperties:
    """Return the properties of a tokenizer, from the cache unless tokens were added to it."""
    properties = _CACHE.get(tokenizer)
    if properties is None or properties.vocabulary_size != len(tokenizer):
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= set(tokenizer.all_special_tokens)
        longest_first = sorted(
            (token for token in special if len(token) > 1), key=lambda token: (-len(token), token)
        )
        pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        properties = _TokenizerProperties(len(tokenizer), _without_prefix(tokenizer), pattern)
        _CACHE[tokenizer] = properties
    return properties


def _parts_without_special_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[str]:
    """Yield parts of the text that contain no special token: each special token is split after its first character."""
    special_tokens, start = _properties(tokenizer).special_tokens, 0
    while special_tokens is not None and (match := special_tokens.search(text, start)):
        yield text[start : match.start() + 1]
        start = match.start() + 1
    yield text[start:]


def _without_prefix(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Return the tokenizer without its dummy prefix; None if it adds no prefix."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    # The normalizer and the pre-tokenizer as JSON; each may be a sequence of others.
    stages = [
        json.loads(stage.__getstate__()) for stage in (backend.normalizer, backend.pre_tokenizer) if stage
    ]
    if not any(_adds_prefix(step) for stage in stages for step in _nested(stage)):
        return None
    fields = json.loads(backend.to_str())
    for part in ("normalizer", "pre_tokenizer"):
        for step in _nested(fields[part]):
            _adds_prefix(step, remove=True)
    prefixless = Tokenizer.from_str(json.dumps(fields))
    prefixless.no_truncation()
    prefixless.no_padding()
    return prefixless


def _nested(step: Any) -> Iterator[dict[str, Any]]:
    """Yield a normalizer or pre-tokenizer and all those nested in it."""
    if isinstance(step, dict):
        yield step
        for inner in (*step.get("normalizers", ()), *step.get("pretokenizers", ())):
            yield from _nested(inner)


def _adds_prefix(step: dict[str, Any], remove: bool = False) -> bool:
    """Return whether a normalizer or pre-tokenizer adds a prefix to a text; with `remove`, turn that off in `step`."""
    prefix_options = {  # by step type: (option that adds the prefix, value that turns it off)
        "Prepend": ("prepend", ""),
        "Metaspace": ("prepend_scheme", "never"),
        "ByteLevel": ("add_prefix_space", False),
    }
    name, value = prefix_options.get(step["type"], ("", None))
    adds = bool(name) and step.get(name, value) != value
    if adds and remove:
        step[name] = value
    return adds
