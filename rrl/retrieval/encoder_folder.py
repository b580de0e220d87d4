"""Load and save the folder of a text encoder: its weights, tokenizer and text settings. Read `load_text_encoder` first."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import normalizers

from rrl.errors import UserError
from rrl.files import shipped
from rrl.models.config import Pooling
from rrl.models.hf import folder_hash, load_encoder, save_encoder
from rrl.models.tokenizer import check_tokenizer, load_tokenizer
from rrl.models.weights import require_folder
from rrl.retrieval.encode import TextEncoder
from rrl.retrieval.settings import SETTINGS_FILE, EncoderSettings, read_settings

FINGERPRINTED_FILES = ("config.json", "model.safetensors", "tokenizer.json", SETTINGS_FILE)
"""The files on which an embedding depends."""


def load_text_encoder(folder: str | Path, settings: Mapping[str, Any] | None = None) -> TextEncoder:
    """Open an encoder folder: Hugging Face weights and tokenizer, and the settings of its texts (see `read_settings`).

    The settings come from `text_encoder.json`, the files of sentence-transformers, or the published name of a known model.
    `settings` has the keys of text_encoder.json and overrides them: `{"family": "bge-en-v1.5", "passage_tokens": 256}`.

    Raises UserError naming what is missing or not supported.
    """
    require_folder("encoder", folder)
    folder = shipped(folder)
    resolved = read_settings(folder, settings)
    tokenizer, encoder = load_tokenizer(folder), load_encoder(folder, pooling=resolved.pooling)
    check_tokenizer(tokenizer, encoder.config, "encoder")
    if tokenizer.pad_token_id is None:
        raise UserError(f"encoder={str(folder)!r}: the tokenizer has no padding token; set pad_token for it")
    if resolved.lower_case:
        _add_lowercasing(tokenizer)
    return TextEncoder(encoder, tokenizer, resolved.text, folder.name, folder_fingerprint(folder, resolved))


def _add_lowercasing(tokenizer: Any) -> None:
    """Make a tokenizer lower-case its texts first."""
    backend = tokenizer.backend_tokenizer
    lower = normalizers.Lowercase()
    backend.normalizer = (
        normalizers.Sequence([lower, backend.normalizer]) if backend.normalizer is not None else lower
    )


def save_text_encoder(folder: str | Path, text_encoder: TextEncoder) -> TextEncoder:
    """Write a folder for `load_text_encoder`; return the encoder with the folder's name and fingerprint."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_encoder(folder, text_encoder.encoder, text_encoder.tokenizer)
    pooling, settings = text_encoder.encoder.config.pooling, dataclasses.asdict(text_encoder.settings)
    if pooling != Pooling():
        settings |= {"pooling": pooling.mode, "normalize": pooling.normalize}
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
    return dataclasses.replace(text_encoder, name=folder.name, fingerprint=folder_fingerprint(folder))


def folder_fingerprint(folder: Path, settings: EncoderSettings | None = None) -> str:
    """Return a SHA-256 over the files on which an embedding depends.

    It also covers `settings` if any of them comes from elsewhere than text_encoder.json (`EncoderSettings.derived`).
    """
    digest = hashlib.sha256()
    for name in FINGERPRINTED_FILES:
        file = folder / name
        size = file.stat().st_size if file.is_file() else 0
        digest.update(f"{name} {size} ".encode())
        if size:
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
    if not (folder / "model.safetensors").is_file():
        # The weights are in several files or another format.
        digest.update(folder_hash(folder).encode())
    if settings and settings.derived:
        digest.update(json.dumps(dataclasses.asdict(settings), sort_keys=True).encode())
    return digest.hexdigest()
