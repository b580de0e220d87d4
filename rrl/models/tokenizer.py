"""Tokenizers: trains a byte-level BPE, loads and checks Hugging Face tokenizers, and maps token ids to exact bytes."""

import functools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rrl.errors import UserError
from rrl.files import looked_in, shipped
from rrl.models.config import DecoderConfig, EncoderConfig
from rrl.text.chat import end_of_turn, template_markers

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
"""Special tokens, as in Qwen2.5: padding, start and end of a chat message. END ends generation."""

PRETOKENIZER = r" ?\p{L}+| ?\p{N}{1,2}| ?</(?=\p{L})| ?[^\s\p{L}\p{N}]|\s+(?!\S)|\s+"
"""Regular expression of the pre-tokenizer: words, pairs of digits ("19" "31"), "</", single symbols, and white space. BPE never
merges across its matches."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, without a default system message."""

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endofturn|>")
"""End tokens of chat models: Qwen and SmolLM, Llama 3, Gemma, Phi, and others. Base models end texts with other tokens."""

QWEN_MARKER = ("<|endoftext|>", 151_643)
"""A token and its id that identify the vocabulary of Qwen2, Qwen2.5 and Qwen3."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE of at most `vocab_size` tokens, including the 256 bytes and the 3 special tokens.

    The same texts in the same order give the same tokenizer. Tags such as <search> are ordinary text.

    Raises:
      UserError: `vocab_size` is too small for bytes and special tokens.
    """
    smallest = 256 + 3
    if vocab_size < smallest:
        raise UserError(
            f"vocab_size={vocab_size}: must be at least {smallest} (256 bytes and 3 special tokens)"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Loads the tokenizer of a Hugging Face folder, offline.

    Raises:
      UserError: the folder is missing, has no tokenizer files, or its tokenizer has no fast (Rust) version.
    """
    folder = shipped(folder)
    if not folder.is_dir():
        raise UserError(
            f"tokenizer folder {folder}: not a folder {looked_in(folder)}; give a Hugging Face folder with tokenizer.json"
        )
    files = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt")
    if not any((folder / name).is_file() for name in files):
        raise UserError(
            f"tokenizer folder {folder}: found none of {', '.join(files)}; "
            "download the tokenizer files of the model into it"
        )
    try:
        tokenizer = _declared_class(folder).from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise UserError(f"tokenizer folder {folder}: transformers cannot load it: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"tokenizer folder {folder}: {type(tokenizer).__name__} has no fast version; add its tokenizer.json"
        )
    _check_normalizer(folder, tokenizer)
    return tokenizer


def _check_normalizer(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Warns once if a Qwen tokenizer's tokenizer.json lacks the NFC normalizer.

    transformers' conversion from GGUF omits it; `rrl.models.gguf_import` writes it. In transformers 5.24, Qwen2Tokenizer, the
    class of Qwen2, Qwen2.5 and Qwen3, has NFC. Llama's tokenizer and those of `train_tokenizer` have no normalizer.
    """
    token, token_id = QWEN_MARKER
    if tokenizer.get_vocab().get(token) == token_id and (folder / "tokenizer.json").is_file():
        normalizes = tokenizer.backend_tokenizer.normalizer is not None
        if not (normalizes and _file_has_normalizer(folder / "tokenizer.json")):
            _warn_normalizer(str(folder), type(tokenizer).__name__ if normalizes else "")


def _file_has_normalizer(file: Path) -> bool:
    return json.loads(file.read_text(encoding="utf-8")).get("normalizer") is not None


@functools.cache
def _warn_normalizer(folder: str, normalizing_class: str) -> None:
    """Logs the warning once per folder; `normalizing_class` is the tokenizer class that normalizes although the file does not."""
    consequence = (
        f"transformers' {normalizing_class} adds it, and so does rrl; programs that read only the file do not"
        if normalizing_class
        else "so accents written as two characters become tokens that the model was not trained on"
    )
    logging.getLogger(__name__).warning(
        "tokenizer folder %s: tokenizer.json has no normalizer, but Qwen's has NFC (transformers' GGUF conversion omits it): %s. "
        'Set "normalizer": {"type": "NFC"} in tokenizer.json.',
        folder,
        consequence,
    )


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    config: DecoderConfig | EncoderConfig,
    field: str = "tokenizer",
    *,
    chat: bool = False,
) -> None:
    """Checks that a tokenizer fits its model.

    Args:
      tokenizer: of the model.
      config: of the model.
      field: name of the config field for error messages (policy, reader, ...).
      chat: whether a chat template is required.

    Raises:
      UserError: the tokenizer has more tokens than the model's vocabulary, its end token is not one of the model's, or the
        required chat template is missing or writes special tokens that the tokenizer lacks.
    """
    name, vocabulary = f"{field}={tokenizer.name_or_path!r}", tokenizer.get_vocab()
    size = max(vocabulary.values()) + 1
    fix = "give a folder whose tokenizer and weights belong together"
    if size > config.vocab_size:
        raise UserError(
            f"{name}: the tokenizer has {size} tokens but the model's vocab_size is {config.vocab_size}; {fix}"
        )
    eos = config.eos_token_id if isinstance(config, DecoderConfig) else None
    if eos is not None and tokenizer.eos_token_id not in (eos if isinstance(eos, tuple) else (eos,)):
        raise UserError(
            f"{name}: the tokenizer's eos_token_id is {tokenizer.eos_token_id} but the model's is {eos}; {fix}, or set "
            "eos_token in tokenizer_config.json"
        )
    if chat:
        _check_template(tokenizer, vocabulary, name)


def _check_template(tokenizer: PreTrainedTokenizerBase, vocabulary: Mapping[str, int], name: str) -> None:
    """Raises UserError if there is no chat template, or if it writes special tokens that the vocabulary lacks."""
    eos = tokenizer.eos_token
    if not tokenizer.chat_template and eos in TURN_ENDS:
        raise UserError(
            f"{name}: the tokenizer has no chat_template, although its end token {eos} is a chat model's; copy "
            "chat_template.jinja (or chat_template of tokenizer_config.json) from the publisher's folder"
        )
    if not tokenizer.chat_template:
        raise UserError(
            f"{name}: the tokenizer has no chat_template, and its end token {eos} is not a chat model's, so this seems to be a "
            "base model; give an instruction-tuned model's folder, or add chat_template to its tokenizer_config.json (to train a "
            "base model, use a recipe with a prompt for base models: --config.recipe.opening=base of r1_searcher, research and "
            "tiresrag)"
        )
    if missing := [token for token in template_markers(tokenizer) if token not in vocabulary]:
        raise UserError(
            f"{name}: the chat_template writes {', '.join(missing)}, but the tokenizer has no such token and would split it as "
            "text, so the template belongs to another model; give the template of this model, or a folder whose tokenizer has "
            "these tokens"
        )


def end_ids(tokenizer: PreTrainedTokenizerBase, config: DecoderConfig) -> list[int]:
    """Ids of the tokens that end generation.

    These are the tokenizer's eos_token, the end tokens in config.json and generation_config.json (Llama 3 has three,
    Qwen2.5-Instruct two), and the token that ends a turn in the chat template. Warns once if the latter is not among the
    others, as in base models with a chat template.

    Raises:
      UserError: the tokenizer has no eos_token.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token: set it in tokenizer_config.json")
    # A single eos_token_id of the config is the tokenizer's (`check_tokenizer`), so only a tuple adds tokens.
    ids = {int(tokenizer.eos_token_id)}
    ids |= set(config.eos_token_id if isinstance(config.eos_token_id, tuple) else ())
    turn_end = end_of_turn(tokenizer)
    if turn_end is not None and turn_end not in ids and turn_end < config.vocab_size:
        _warn_end_of_turn(
            tokenizer.name_or_path, str(tokenizer.convert_ids_to_tokens(turn_end)), str(tokenizer.eos_token)
        )
        ids.add(turn_end)
    return sorted(ids)


@functools.cache
def _warn_end_of_turn(folder: str, turn_end: str, eos: str) -> None:
    logging.getLogger(__name__).warning(
        "tokenizer folder %s: its chat template ends a turn with %s, which is not an end token in tokenizer_config.json "
        "(eos_token %s), config.json or generation_config.json. It is used as an end token too. This is usual for a base "
        "model, which may not follow the prompt's instructions: use the instruction-tuned model, unless the recipe starts from "
        "a base model.",
        folder,
        turn_end,
        eos,
    )


def _declared_class(folder: Path) -> Any:
    """PreTrainedTokenizerFast, which follows tokenizer.json, if a folder declares this class; otherwise AutoTokenizer.

    transformers 5 calls it TokenizersBackend. If config.json has model_type qwen2, AutoTokenizer uses Qwen's class whatever
    class the folder declares. That class splits text by Qwen's rules, so the tokenizer would differ from the saved one.
    """
    try:
        declared = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get(
            "tokenizer_class"
        )
    except FileNotFoundError:
        declared = None
    generic = (
        declared in ("TokenizersBackend", "PreTrainedTokenizerFast") and (folder / "tokenizer.json").is_file()
    )
    return PreTrainedTokenizerFast if generic else AutoTokenizer


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """The exact bytes of each token id; b"" for special tokens and ids without a token.

    Decoding one id at a time would lose information: half a character becomes U+FFFD, and a leading space may vanish.
    Supports byte-level tokenizers (GPT-2, Qwen2, Llama 3) and SentencePiece with byte fallback.

    Raises:
      UserError: the tokenizer is of another kind, for example WordPiece.
    """
    pieces = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    added = tokenizer.added_tokens_decoder
    special |= {index for index, token in added.items() if token.special}
    to_bytes = _byte_level if _is_byte_level(tokenizer) else _sentence_piece
    if to_bytes is _sentence_piece and not any("▁" in piece for piece in pieces):
        raise UserError(
            f"tokenizer {type(tokenizer).__name__}: neither byte-level nor SentencePiece, so the bytes of its tokens "
            "are unknown; use the tokenizer of a causal language model"
        )
    table = [b""] * (max(pieces.values()) + 1)
    for piece, index in pieces.items():
        if index in special:
            continue
        # Tokens added to a byte-level vocabulary are plain text. SentencePiece decodes added tokens like others (Gemma adds
        # runs of ▁).
        is_text = index in added and to_bytes is _byte_level
        table[index] = piece.encode() if is_text else to_bytes(piece)
    return table


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = () if backend is None else (backend.decoder, backend.pre_tokenizer)
    # The state of such an object is its part of tokenizer.json. The whole file has megabytes, most of them vocabulary.
    states = [json.loads(part.__getstate__()) for part in parts if part is not None]
    return any(kind == "ByteLevel" for state in states for kind in _types(state))


def _types(node: object) -> Iterator[str]:
    """Yields the "type" of every decoder and pre-tokenizer in a tokenizer.json."""
    if isinstance(node, dict):
        for part in ("decoder", "pre_tokenizer", "decoders", "pretokenizers"):
            yield from _types(node.get(part))
        if isinstance(node.get("type"), str):
            yield node["type"]
    elif isinstance(node, list):
        for item in node:
            yield from _types(item)


def _character_to_byte() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes map to themselves, the others to U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_OUTSIDE_LATIN_1 = 0x100
_TO_LATIN_1 = dict.fromkeys(range(256), _OUTSIDE_LATIN_1) | {
    ord(character): byte for character, byte in _character_to_byte().items()
}
"""For `str.translate`: maps GPT-2's alphabet to the characters of Latin-1, each of which is one byte, and the characters of
Latin-1 that are not in the alphabet to one that Latin-1 lacks."""


def _byte_level(piece: str) -> bytes:
    """Bytes of a byte-level token. A token with a character outside the alphabet is plain text, as in `tokenizers`."""
    try:
        return piece.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()


def _sentence_piece(piece: str) -> bytes:
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
    return bytes([int(byte.group(1), 16)]) if byte else piece.replace("▁", " ").encode()
