"""Find the architecture of a policy, also before its model is downloaded. Read `policy_shape` first."""

import pathlib
from collections.abc import Mapping
from typing import Any

from rrl.errors import UserError
from rrl.files import shipped
from rrl.models.config import DecoderConfig
from rrl.models.hf import read_decoder_config

_QWEN = {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-3B": _QWEN
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 11008,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": _QWEN
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "tie_word_embeddings": False,
    },
}
"""Model name -> fields of its config.json, for the models of the papers' runs. A run can thus be planned before the model is
downloaded."""


def policy_shape(folder: str) -> tuple[DecoderConfig, str]:
    """Return the architecture of a policy and its source: the config.json of its folder, or the published model of that name."""
    if (shipped(folder) / "config.json").is_file():
        return read_decoder_config(folder), f"{folder}/config.json"
    for name, fields in PUBLISHED.items():
        if pathlib.Path(folder).name.startswith(name):
            source = f"the published architecture of {name}; there is no {folder}/config.json"
            return DecoderConfig.from_hf(fields), source
    raise UserError(
        f"policy={folder!r} is not a Hugging Face folder (no config.json), and its name is not that of a "
        f"model with a known architecture ({', '.join(PUBLISHED)}); give another policy"
    )
