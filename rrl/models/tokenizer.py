"""Tokenizers: training a byte-level BPE, loading any Hugging Face one, and the exact bytes of every token id."""

import functools
import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rrl.errors import UserError
from rrl.files import looked_in, shipped
from rrl.models.config import DecoderConfig, EncoderConfig
from rrl.text.chat import end_of_turn

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
"""Padding, start and end of a chat message, named as in Qwen2.5; the end of a message ends generation."""

PIECES = r" ?\p{L}+| ?\p{N}{1,2}| ?</(?=\p{L})| ?[^\s\p{L}\p{N}]|\s+(?!\S)|\s+"
"""What may never be merged across: words, digits in pairs ("19" "31"), "</" and single signs, white space."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, without a system message of its own."""

QWEN_END = ("<|endoftext|>", 151_643)
"""The token and id by which the vocabulary of Qwen2, Qwen2.5 and Qwen3 is known, whatever folder it lies in."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most `vocab_size` tokens, the 256 bytes and the 3 special tokens among them.

    The same texts in the same order give the same tokenizer. Tags such as <search> are ordinary text in it.

    Raises:
      UserError: a vocabulary too small for bytes and special tokens.
    """
    smallest = 256 + 3
    if vocab_size < smallest:
        raise UserError(
            f"vocab_size={vocab_size}: must be at least {smallest} (256 bytes and 3 special tokens)"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
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
    """Load the tokenizer of a Hugging Face folder, offline.

    Raises:
      UserError: no such folder, no tokenizer files in it, or one without a fast (Rust) form.
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
            f"tokenizer folder {folder}: {type(tokenizer).__name__} has no fast form; add its tokenizer.json"
        )
    _warn_of_lost_normalizer(folder, tokenizer)
    return tokenizer


def _warn_of_lost_normalizer(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Logs once a folder whose tokenizer.json lacks the NFC normalizer of Qwen's own, as conversions from GGUF leave it.

    Seen in transformers 5.24: Qwen2Tokenizer, which Qwen2, Qwen2.5 and Qwen3 declare, has NFC; Llama's has no normalizer, and
    neither have vocabularies that `train_tokenizer` made.
    """
    token, own = QWEN_END
    if tokenizer.get_vocab().get(token) == own and (folder / "tokenizer.json").is_file():
        normalizes = tokenizer.backend_tokenizer.normalizer is not None
        if not (normalizes and _file_has_normalizer(folder / "tokenizer.json")):
            _say_lost(str(folder), type(tokenizer).__name__ if normalizes else "")


def _file_has_normalizer(file: Path) -> bool:
    return json.loads(file.read_text(encoding="utf-8")).get("normalizer") is not None


@functools.cache
def _say_lost(folder: str, adding: str) -> None:
    """The warning; `adding` is the class that normalizes although the file does not."""
    here = (
        f"transformers' {adding} applies it all the same, so that rrl does; programs that read the file alone do not"
        if adding
        else "so that accents written as two characters become other tokens than the model was trained on"
    )
    logging.getLogger(__name__).warning(
        "tokenizer folder %s: tokenizer.json has no normalizer, but Qwen's own has NFC (a conversion from GGUF loses it): %s. "
        'Set "normalizer": {"type": "NFC"} in it.',
        folder,
        here,
    )


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    config: DecoderConfig | EncoderConfig,
    field: str = "tokenizer",
    *,
    chat: bool = False,
) -> None:
    """Refuses a tokenizer that is not its model's.

    Raises UserError naming `field` (policy, reader, ...) and the folder: more tokens than the model's vocabulary, an end
    that is none of the model's, or (with `chat`) no chat template.
    """
    name = f"{field}={tokenizer.name_or_path!r}"
    size = max(tokenizer.get_vocab().values()) + 1
    cure = "give a folder whose tokenizer and weights belong together"
    if size > config.vocab_size:
        raise UserError(
            f"{name}: the tokenizer has {size} tokens but the model's vocab_size is {config.vocab_size}; {cure}"
        )
    eos = config.eos_token_id if isinstance(config, DecoderConfig) else None
    if eos is not None and tokenizer.eos_token_id not in (eos if isinstance(eos, tuple) else (eos,)):
        raise UserError(
            f"{name}: the tokenizer's eos_token_id is {tokenizer.eos_token_id} but the model's is {eos}; {cure}, or set "
            "eos_token in tokenizer_config.json"
        )
    if chat and not tokenizer.chat_template:
        raise UserError(
            f"{name}: the tokenizer has no chat_template; give an instruction-tuned model's folder, or add "
            "chat_template to its tokenizer_config.json"
        )


def end_ids(tokenizer: PreTrainedTokenizerBase, config: DecoderConfig) -> list[int]:
    """The tokens that end what a model writes: the tokenizer's end; whatever else the model's config.json and
    generation_config.json say ends a text (Llama 3 has three, Qwen2.5-Instruct two); and what the chat template puts behind a
    turn.

    Logs once a template whose end of turn is none of the others, as base models with a chat template have it. Raises UserError
    for a tokenizer without an end.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token: set it in tokenizer_config.json")
    ends = {int(tokenizer.eos_token_id)}
    ends |= set(config.eos_token_id if isinstance(config.eos_token_id, tuple) else ())
    turn = end_of_turn(tokenizer)
    if turn is not None and turn not in ends and turn < config.vocab_size:
        _say_end_of_turn(
            tokenizer.name_or_path, str(tokenizer.convert_ids_to_tokens(turn)), str(tokenizer.eos_token)
        )
        ends.add(turn)
    return sorted(ends)


@functools.cache
def _say_end_of_turn(folder: str, turn: str, eos: str) -> None:
    logging.getLogger(__name__).warning(
        "tokenizer folder %s: its chat template ends a turn with %s, which neither tokenizer_config.json (eos_token %s) nor "
        "config.json nor generation_config.json calls an end. Turns end there too.",
        folder,
        turn,
        eos,
    )


def _declared_class(folder: Path) -> Any:
    """The class that loads a folder's tokenizer as its tokenizer.json says.

    Beside a config.json of model_type qwen2, AutoTokenizer takes Qwen's own class whatever the folder declares, and
    that class splits text by Qwen's rules: another tokenizer than the one that was saved.
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
    """The exact bytes of each token id, b"" for special tokens and ids without a token.

    Decoding one id at a time is lossy (half a character becomes U+FFFD, a leading space may vanish); this is not.
    Understands byte-level tokenizers (GPT-2, Qwen2, Llama 3) and those of SentencePiece with byte fallback.

    Raises:
      UserError: a tokenizer of another kind, for example WordPiece.
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
        # Added to a byte-level vocabulary, a token is text; SentencePiece's decoder makes no difference (Gemma adds runs of ▁).
        as_it_is = index in added and to_bytes is _byte_level
        table[index] = piece.encode() if as_it_is else to_bytes(piece)
    return table


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    return any(kind == "ByteLevel" for kind in _types(json.loads(backend.to_str())))


def _types(node: object) -> Iterator[str]:
    """The "type" of every decoder and pre-tokenizer in a tokenizer.json."""
    if isinstance(node, dict):
        for part in ("decoder", "pre_tokenizer", "decoders", "pretokenizers"):
            yield from _types(node.get(part))
        if isinstance(node.get("type"), str):
            yield node["type"]
    elif isinstance(node, list):
        for item in node:
            yield from _types(item)


def _character_to_byte() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _character_to_byte()


def _byte_level(piece: str) -> bytes:
    """A piece with a character beyond the alphabet is text, as for the decoder of `tokenizers`."""
    try:
        return bytes(_BYTES[character] for character in piece)
    except KeyError:
        return piece.encode()


def _sentence_piece(piece: str) -> bytes:
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
    return bytes([int(byte.group(1), 16)]) if byte else piece.replace("▁", " ").encode()
