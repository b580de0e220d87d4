"""Token ids of texts: of a text as it stands, of a text that others wrote, and of what a chat template wrote."""

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
"""Noncharacters of Unicode, which no text holds that may be exchanged: one marks where a name is cut (`split_names`)."""


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Int[np.ndarray, "T"]:
    """Token ids whose bytes are the text's, but for `replace_lone_surrogates`; no special tokens added.

    Tokenizers that put a space before a text (SentencePiece's dummy prefix) put none: the text may continue another.
    """
    exact = _facts(tokenizer).exact
    if exact is None:
        return template_ids(tokenizer, text)
    if (
        exact.encode_special_tokens != tokenizer.split_special_tokens
    ):  # not at each call: other threads encode
        exact.encode_special_tokens = tokenizer.split_special_tokens
    return np.asarray(exact.encode(replace_lone_surrogates(text), add_special_tokens=False).ids, np.int32)


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Int[np.ndarray, "T"]:
    """`text_ids` of a text that others wrote: where it holds the name of a special token, that is text and no control token."""
    parts = [text_ids(tokenizer, part) for part in _split_at_names(tokenizer, text)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def special_name(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The first name of a special token in a text; "" without one."""
    names = _facts(tokenizer).names
    found = names.search(text) if names is not None else None
    return found[0] if found else ""


def split_names(tokenizer: PreTrainedTokenizerBase, text: str, cut: str) -> str:
    """The text with `cut`, one of `NONCHARACTERS`, inside the name of each special token."""
    return cut.join(_split_at_names(tokenizer, text))


def template_ids(tokenizer: PreTrainedTokenizerBase, text: str, cut: str = "") -> Int[np.ndarray, "T"]:
    """Token ids as the tokenizer gives them to the start of a text, with its dummy prefix if it has one, and with the special
    tokens that the text names, but for names with a `cut` inside (`split_names`)."""
    if cut and cut in text:
        first, *others = text.split(cut)
        return np.concatenate(
            [template_ids(tokenizer, first), *(text_ids(tokenizer, part) for part in others)]
        )
    text, backend = replace_lone_surrogates(text), getattr(tokenizer, "backend_tokenizer", None)
    # What an earlier call asked for stays with the backend.
    if (
        backend is None
        or backend.truncation
        or backend.padding
        or backend.encode_special_tokens != tokenizer.split_special_tokens
    ):
        return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
    # In this thread: `tokenizer.encode` hands even one text to threads, which wait for a core while rollouts have all.
    return np.asarray(backend.encode(text, add_special_tokens=False).ids, np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class _TokenizerFacts:
    """What is found out once about a tokenizer."""

    tokens: int
    exact: Tokenizer | None
    """The same without its dummy prefix; None where it has none."""
    names: re.Pattern[str] | None
    """The names of its special tokens. One of a single character cannot be cut and is left out."""


_KNOWN: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, _TokenizerFacts]" = weakref.WeakKeyDictionary()


def _facts(tokenizer: PreTrainedTokenizerBase) -> _TokenizerFacts:
    found = _KNOWN.get(tokenizer)
    if found is None or found.tokens != len(tokenizer):
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= set(tokenizer.all_special_tokens)
        longest_first = sorted(
            (name for name in special if len(name) > 1), key=lambda name: (-len(name), name)
        )
        names = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        found = _KNOWN[tokenizer] = _TokenizerFacts(len(tokenizer), _without_prefix(tokenizer), names)
    return found


def _split_at_names(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[str]:
    """The text in parts, none of which holds the name of a special token: each is cut behind its first character."""
    names, start = _facts(tokenizer).names, 0
    while names is not None and (found := names.search(text, start)):
        yield text[start : found.start() + 1]
        start = found.start() + 1
    yield text[start:]


def _without_prefix(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """The tokenizer without what it puts before a text; None where it puts nothing there."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    steps = [json.loads(step.__getstate__()) for step in (backend.normalizer, backend.pre_tokenizer) if step]
    if not any(_adds_prefix(step) for top in steps for step in _nested(top)):
        return None
    fields = json.loads(backend.to_str())
    for part in ("normalizer", "pre_tokenizer"):
        for step in _nested(fields[part]):
            _adds_prefix(step, remove=True)
    exact = Tokenizer.from_str(json.dumps(fields))
    exact.no_truncation()
    exact.no_padding()
    return exact


def _nested(step: Any) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer and all those inside it."""
    if isinstance(step, dict):
        yield step
        for inner in (*step.get("normalizers", ()), *step.get("pretokenizers", ())):
            yield from _nested(inner)


def _adds_prefix(step: dict[str, Any], remove: bool = False) -> bool:
    """Whether a step of a tokenizer puts something before a text, which `remove` makes it leave out."""
    nothing = {
        "Prepend": ("prepend", ""),
        "Metaspace": ("prepend_scheme", "never"),
        "ByteLevel": ("add_prefix_space", False),
    }
    name, value = nothing.get(step["type"], ("", None))
    found = bool(name) and step.get(name, value) != value
    if found and remove:
        step[name] = value
    return found
