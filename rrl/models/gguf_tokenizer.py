"""Builds a Hugging Face tokenizer from GGUF's metadata. Read `build_tokenizer` first.

The supported architectures have two kinds of tokenizers: byte-level BPE ("gpt2"), whose pre-tokenizer has a name, and
SentencePiece's BPE ("llama"), which has scores instead of merges.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from rrl.errors import UserError
from rrl.models.gguf_config import token_id, tokens
from rrl.models.gguf_file import CONVERT_AGAIN, GgufFile

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""llama.cpp's types of tokens. Others are UNKNOWN (2), UNUSED (5) and BYTE (6)."""

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
"""As Qwen2's, with up to three digits in a word."""


@dataclasses.dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a byte-level BPE splits a text into words; merges never cross them."""

    words: str = ""
    """Regular expression of a word; empty: GPT-2's."""
    single_digits: bool = False
    """Whether each digit is a word."""
    nfc: bool = False
    """Whether the text is normalised to NFC first."""
    whole_words: bool = False
    """Whether a word that is a token is not split, whatever the merges say."""
    add_bos: bool = False
    """Whether a text starts with the bos token if the metadata do not say."""

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer of the tokenizers package."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.words:
            steps.append(pre_tokenizers.Split(Regex(self.words), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.words))
        return pre_tokenizers.Sequence(steps)


_LLAMA3 = PreTokenizer(LLAMA3_WORDS, whole_words=True, add_bos=True)
PRE_TOKENIZERS = {
    "qwen2": PreTokenizer(QWEN2_WORDS, nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smollm": PreTokenizer(single_digits=True),
    "gpt-2": PreTokenizer(),
}
"""By llama.cpp's name (tokenizer.ggml.pre)."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file."""

    file: GgufFile
    tokens: Sequence[str]
    types: np.ndarray
    """llama.cpp's type of each token."""

    @classmethod
    def of(cls, file: GgufFile, size: int) -> "Vocabulary":
        """Reads the tokens. Raises UserError if they are missing, or more than the `size` rows of the embedding."""
        found = tokens(file)
        if len(found) > size:
            raise UserError(
                f"{file.path} has {len(found)} tokens, but its embedding has {size} rows; {CONVERT_AGAIN}"
            )
        return cls(file, found, cls._column(file, "token_type", len(found), np.full(len(found), NORMAL)))

    @staticmethod
    def _column(file: GgufFile, key: str, size: int, default: np.ndarray | None = None) -> np.ndarray:
        """An array with a number for each token. Raises UserError if it is missing without a default, or has another size."""
        values = file.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(values, np.ndarray) or len(values) != size:
            raise UserError(
                f"{file.path}: the metadata tokenizer.ggml.{key} must hold a number for each of the {size} tokens; "
                f"{CONVERT_AGAIN}"
            )
        return values

    @property
    def scores(self) -> np.ndarray:
        """SentencePiece's score of each token."""
        return self._column(self.file, "scores", len(self.tokens))

    def merges(self) -> list[tuple[str, str]] | None:
        """The merges in the file, best first; None if it has none. Raises UserError if one is not a pair."""
        merges = self.file.metadata.get("tokenizer.ggml.merges")
        if merges is None:
            return None
        pairs = [tuple(merge.split(" ")) for merge in merges] if isinstance(merges, list) else [()]
        if bad := next((pair for pair in pairs if len(pair) != 2), None):
            raise UserError(
                f"{self.file.path}: {' '.join(bad)!r} in tokenizer.ggml.merges is not a pair; {CONVERT_AGAIN}"
            )
        return pairs  # type: ignore[return-value]  # each has two parts

    def special(self, key: str) -> str | None:
        """The text of a special token; None if the file does not name it."""
        index = token_id(self.file, key)
        return None if index is None else self.tokens[index]

    def flag(self, key: str, default: bool) -> bool:
        """A yes or no of the metadata."""
        return bool(self.file.metadata.get(f"tokenizer.ggml.{key}", default))


def build_tokenizer(file: GgufFile, vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Builds the tokenizer with its special tokens and chat template.

    Args:
        file: whose metadata hold the tokenizer.
        vocab_size: rows of the model's embedding.
        max_length: the model's longest text, in tokens.

    Raises:
        UserError: the tokenizer's model or pre-tokenizer is unknown, or its data are missing or contradictory.
    """
    model = file.text("tokenizer.ggml.model")
    vocabulary = Vocabulary.of(file, vocab_size)
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if model not in builders:
        raise UserError(
            f"{file.path}: tokenizer.ggml.model={model!r} is not supported; choose a model whose tokenizer is one of "
            f"{', '.join(builders)}"
        )
    try:
        tokenizer, add_bos = builders[model](vocabulary)
    except UserError:
        raise
    except Exception as error:  # the tokenizers package raises the bare class
        raise UserError(
            f"{file.path}: the tokenizer's data contradict each other: {error}; {CONVERT_AGAIN}"
        ) from error
    _add_special_tokens(tokenizer, vocabulary)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: token for name, key in names.items() if (token := vocabulary.special(key)) is not None}
    add = {
        "add_bos_token": vocabulary.flag("add_bos_token", add_bos) and "bos_token" in special,
        "add_eos_token": vocabulary.flag("add_eos_token", False) and "eos_token" in special,
    }
    _add_bos_and_eos(tokenizer, special, add)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **special,
        **add,
    )
    if template := file.metadata.get("tokenizer.chat_template"):
        wrapped.chat_template = template
    return wrapped


def _byte_level(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """A byte-level BPE, and whether texts start with the bos token by default."""
    name = vocabulary.file.text("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise UserError(
            f"{vocabulary.file.path}: the pre-tokenizer tokenizer.ggml.pre={name!r} is not supported; it must be one of "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    merges = vocabulary.merges()
    if merges is None:
        raise UserError(f"{vocabulary.file.path}: the metadata lack tokenizer.ggml.merges; {CONVERT_AGAIN}")
    rule = PRE_TOKENIZERS[name]
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=rule.whole_words))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rule.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos


def _sentence_piece(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE with byte fallback, as Gemma's, Llama 2's and Mistral's; texts start with the bos token by default."""
    # The files hold tokens of several spaces as they are; inside the model a space is ▁.
    spelled = [token if token.strip(" ") else "▁" * len(token) for token in vocabulary.tokens]
    ids = {token: index for index, token in enumerate(spelled)}
    merges = vocabulary.merges()
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges_of(ids, vocabulary) if merges is None else merges,
            unk_token=vocabulary.special("unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = vocabulary.flag("add_space_prefix", not vocabulary.file.architecture.startswith("gemma"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", left=1, right=0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges_of(ids: Mapping[str, int], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores stand for, best first.

    SentencePiece merges the neighbours whose union has the best score. Each way to split a token into two tokens is therefore a
    merge, with the token's score as its rank. User-defined tokens come first: SentencePiece never splits them.
    """
    found: list[tuple[float, int, int, int, str, str]] = []
    scores = vocabulary.scores
    for token, index in ids.items():
        kind = int(vocabulary.types[index])
        if kind not in (NORMAL, USER_DEFINED):
            continue
        rank = -float(scores[index]) if kind == NORMAL else -np.inf
        splits = [
            (token[:at], token[at:]) for at in range(1, len(token)) if token[:at] in ids and token[at:] in ids
        ]
        # Splits of one token in transformers' order: the longest left part first.
        found += [(rank, index, -len(left), ids[left], left, right) for left, right in splits]
    found.sort(key=lambda merge: merge[:4])
    return [(left, right) for *_, left, right in found]


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Adds the tokens that are found in a text before anything else: control tokens and user-defined ones."""
    ids = tokenizer.get_vocab()
    added = [
        AddedToken(token, normalized=False, special=bool(kind == CONTROL))
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (CONTROL, USER_DEFINED) and token in ids
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])


def _add_bos_and_eos(tokenizer: Tokenizer, special: Mapping[str, str], add: Mapping[str, Any]) -> None:
    """Makes the tokenizer put the bos and eos tokens around each text, as far as `add` says."""
    start = [special["bos_token"]] if add["add_bos_token"] else []
    end = [special["eos_token"]] if add["add_eos_token"] else []
    if not start and not end:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*start, "$A:0", *end],
        pair=[
            *start,
            "$A:0",
            *end,
            *(f"{token}:1" for token in start),
            "$B:1",
            *(f"{token}:1" for token in end),
        ],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(start + end)],
    )
