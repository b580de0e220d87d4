"""What an export needs beside a checkpoint: description of the model, tokenizer and recipe card, kept in the workdir of a run."""

import os
import pathlib

from transformers import PreTrainedTokenizerBase

from rrl.files import shipped
from rrl.models.config import DecoderConfig
from rrl.models.hf import folder_hash, save_config_and_tokenizer
from rrl.models.weights import write_json
from rrl.recipes.card import RecipeCard, write_card

MODEL_FILES = "model_files"
START_FILE = "start.json"
"""File in MODEL_FILES that names the folder a run started from, and its hash."""


def write_model_files(
    workdir: str | os.PathLike[str],
    config: DecoderConfig,
    tokenizer: PreTrainedTokenizerBase,
    card: RecipeCard | None = None,
    start: str | pathlib.Path | None = None,
) -> None:
    """Keeps in a run's workdir what an export needs beside a checkpoint.

    `start` is the folder the run started from: checkpoints do not hold what training leaves as it was.
    """
    folder = pathlib.Path(workdir, MODEL_FILES)
    save_config_and_tokenizer(folder, config, tokenizer)
    if start is not None:
        write_json(
            folder / START_FILE, {"folder": os.path.abspath(shipped(start)), "sha256": folder_hash(start)}
        )
    if card is not None:
        write_card(folder, card)
