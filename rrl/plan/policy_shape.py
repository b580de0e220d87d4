"""Find the architecture of a policy, also before its model is downloaded. Read `policy_shape` first."""

import pathlib
from collections.abc import Mapping
from typing import Any

from rrl.errors import UserError
from rrl.files import shipped
from rrl.models.config import DecoderConfig
from rrl.models.hf import read_decoder_config

_GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
}
_QWEN = {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-0.5B": _QWEN
    | {
        "vocab_size": 151936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "tie_word_embeddings": True,
    },
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
    "gemma-3-1b": _GEMMA3
    | {
        "vocab_size": 262144,
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
    },
    "gemma-3-4b": _GEMMA3
    | {
        "vocab_size": 262208,
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 10240,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}
"""Model name -> fields of its config.json, for the models of the papers' runs, the smallest Qwen2.5 and Gemma 3. A run can thus
be planned before the model is downloaded."""


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
