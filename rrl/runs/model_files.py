"""The files that an export needs besides a checkpoint: model description, tokenizer and recipe card, in a run's workdir."""

import os
import pathlib

from transformers import PreTrainedTokenizerBase

from rrl.files import shipped
from rrl.models.config import DecoderConfig
from rrl.models.hf import folder_hash, save_config_and_tokenizer
from rrl.models.weights import write_json
from rrl.recipes.card import RecipeCard, write_card

MODEL_FILES = "model_files"
"""Folder of a workdir with these files."""
START_FILE = "start.json"
"""File in `MODEL_FILES` with the path and the hash of the initial model's folder."""


def write_model_files(
    workdir: str | os.PathLike[str],
    config: DecoderConfig,
    tokenizer: PreTrainedTokenizerBase,
    card: RecipeCard | None = None,
    initial_model: str | pathlib.Path | None = None,
    initial_hash: str | None = None,
) -> None:
    """Write to a run's workdir what an export needs besides a checkpoint.

    Args:
        workdir: folder of the run.
        config: shape of the model.
        tokenizer: its tokenizer.
        card: recipe card; None if the run has none.
        initial_model: folder of the initial model; None if the run had none. An export reads the frozen parameters from it,
            because checkpoints do not contain them.
        initial_hash: `folder_hash(initial_model)`, if it is known already: hashing takes a second per gigabyte.
    """
    folder = pathlib.Path(workdir, MODEL_FILES)
    save_config_and_tokenizer(folder, config, tokenizer)
    if initial_model is not None:
        write_json(
            folder / START_FILE,
            {
                "folder": os.path.abspath(shipped(initial_model)),
                "sha256": initial_hash or folder_hash(initial_model),
            },
        )
    if card is not None:
        write_card(folder, card)
