"""Translates GGUF's metadata to the content of Hugging Face's config.json. Read `hf_config` first.

What a missing key means follows llama.cpp, which defines the format.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rrl.errors import UserError
from rrl.models.config import NO_WINDOW
from rrl.models.gguf_file import CONVERT_AGAIN, GgufFile, read_tensor
from rrl.models.gguf_tensors import ROPE_FACTORS, architecture


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The content of config.json, in the form that transformers 4 and 5 and vLLM read.

    Raises:
        UserError: the architecture or a setting is not supported, or metadata or the embedding are missing or wrong.
    """
    kind, prefix = architecture(file), file.architecture
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path} lacks the tensor token_embd.weight; {CONVERT_AGAIN}")
    hidden = file.integer(f"{prefix}.embedding_length", least=1)
    heads = file.integer(f"{prefix}.attention.head_count", least=1)
    theta = file.number(f"{prefix}.rope.freq_base", 10_000.0)
    head_dim = _head_dim(file, hidden // heads)
    config: dict[str, Any] = {
        "architectures": [kind.model_class],
        "model_type": kind.model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": file.integer(f"{prefix}.block_count", least=1),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer(f"{prefix}.attention.head_count_kv", heads, least=1),
        "head_dim": head_dim,
        "intermediate_size": file.integer(f"{prefix}.feed_forward_length", least=1),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, theta, head_dim),
        "rms_norm_eps": file.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "max_position_embeddings": file.integer(f"{prefix}.context_length", least=1),
        "attention_dropout": 0.0,
        **token_ids(file),
    }
    if kind.model_type != "qwen2":
        config["attention_bias"] = False
    return config | (_gemma3(file, config) if prefix == "gemma3" else {"hidden_act": "silu"})


def tokens(file: GgufFile) -> list[str]:
    """The vocabulary. Raises UserError if the file has none."""
    found = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(found, list) or not found:
        raise UserError(f"{file.path}: the metadata lack tokenizer.ggml.tokens; {CONVERT_AGAIN}")
    return found


def token_ids(file: GgufFile) -> dict[str, int | None]:
    """The ids of the special tokens that config.json names; None if the file has none."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: token_id(file, key) for name, key in keys.items()}


def end_ids(file: GgufFile) -> list[int]:
    """Ids of all tokens that end generation: the ends of a text, of a turn and of a message."""
    ids = [token_id(file, key) for key in ("eos", "eot", "eom")]
    return list(dict.fromkeys(index for index in ids if index is not None))


def token_id(file: GgufFile, key: str) -> int | None:
    """The id of a special token; None if the file does not name it. Raises UserError if it is not in the vocabulary."""
    name = f"tokenizer.ggml.{key}_token_id"
    if name not in file.metadata:
        return None
    index, size = file.integer(name), len(tokens(file))
    if index >= size:
        raise UserError(f"{file.path}: {name}={index} is not below the {size} tokens; {CONVERT_AGAIN}")
    return index


def _head_dim(file: GgufFile, default: int) -> int:
    """Head dimension H. Raises UserError if values have another one, or if RoPE rotates only a part."""
    prefix = file.architecture
    size = file.integer(f"{prefix}.attention.key_length", default, least=1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := file.integer(f"{prefix}.{key}", size)) != size:
            raise UserError(
                f"{file.path}: {prefix}.{key}={other} differs from the heads' {size} dimensions, which is not supported; "
                "give another model"
            )
    return size


def _rope_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """rope_scaling of config.json. Raises UserError if the file's scaling is of another kind."""
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, theta, head_dim)
    prefix = f"{file.architecture}.rope.scaling."
    settings = {
        key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
    }
    key, former_key = prefix + "factor", f"{file.architecture}.rope.scale_linear"
    if key not in file.metadata and former_key in file.metadata:
        key, settings["factor"] = former_key, file.metadata[former_key]
    # Without a type, llama.cpp scales linearly by the factor. 0 and 1 mean no scaling.
    kind = settings.pop("type", "linear" if settings.get("factor") else "none")
    settings.pop("finetuned", None)
    known = {"none": {"factor"}, "linear": {"factor"}, "yarn": {"factor", "original_context_length"}}
    if kind not in known or settings.keys() - known[kind]:
        raise UserError(
            f"{file.path}: RoPE scaling {kind!r} with {', '.join(settings) or 'no settings'} is not supported; it must be "
            "none, linear (factor) or yarn (factor, original_context_length)"
        )
    if kind == "none" or (kind == "linear" and settings.get("factor", 0) in (0, 1)):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": file.number(key)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.integer(
            prefix + "original_context_length", least=1
        )
    return scaling


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Recovers Llama 3.1's scaling from its divisors of the frequencies, since the metadata do not hold it."""
    divisors = read_tensor(file, file.tensors[ROPE_FACTORS]).reshape(-1)
    factor = float(str(divisors.max()))
    low, high, original = 1.0, 4.0, 8192  # of all Llama 3.1, 3.2 and 3.3 models
    turns = original / (2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4, atol=0):
        raise UserError(
            f"{file.path}: the values of {ROPE_FACTORS} are not those of Llama 3.1's RoPE scaling (low_freq_factor=1, "
            "high_freq_factor=4, original_max_position_embeddings=8192), and no other is supported; give another model"
        )
    if factor == 1:
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _gemma3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only Gemma 3 has."""
    layers, hidden, heads = (
        config[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    pattern = file.integer("gemma3.attention.sliding_window_pattern", 6, least=1)
    if cap := file.metadata.get("gemma3.final_logit_softcapping"):
        raise UserError(
            f"{file.path}: gemma3.final_logit_softcapping={cap} is not supported; give another model"
        )
    window = file.integer("gemma3.attention.sliding_window", 0)  # 0: all layers attend to all tokens
    # GGUF has no key for query_pre_attn_scalar. It is hidden / heads for the 27B model, which llama.cpp recognises by its 62
    # layers, and the head dimension for all others.
    scale = hidden // heads if layers == 62 else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale,
        "sliding_window": window or NO_WINDOW,
        "layer_types": [
            "sliding_attention" if window and (layer + 1) % pattern else "full_attention"
            for layer in range(layers)
        ],
        "rope_local_base_freq": file.number("gemma3.rope.freq_base_swa", 10_000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
