"""Translates GGUF's metadata and tensor names to Hugging Face's: config.json, and where each tensor comes from.

Read `hf_config` and `tensor_sources` first. What a missing key means follows llama.cpp, which defines the format.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rrl.errors import UserError
from rrl.models.gguf_file import CONVERT_AGAIN, GgufFile, read_tensor
from rrl.models.transfer import MAX_LISTED_NAMES

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor that holds Llama 3.1's RoPE scaling: a divisor of each frequency."""

Table = Mapping[str, tuple[str, str]]
"""GGUF name -> (Hugging Face name, axes). Axes: V vocabulary, D hidden, F mlp, Q and K all query and key heads, H one head."""

_TOP: Table = {
    "token_embd.weight": ("model.embed_tokens.weight", "VD"),
    "output_norm.weight": ("model.norm.weight", "D"),
    "output.weight": ("lm_head.weight", "VD"),
}
_LAYER: Table = {
    "attn_norm.weight": ("input_layernorm.weight", "D"),
    "attn_q.weight": ("self_attn.q_proj.weight", "QD"),
    "attn_k.weight": ("self_attn.k_proj.weight", "KD"),
    "attn_v.weight": ("self_attn.v_proj.weight", "KD"),
    "attn_output.weight": ("self_attn.o_proj.weight", "DQ"),
    "ffn_gate.weight": ("mlp.gate_proj.weight", "FD"),
    "ffn_up.weight": ("mlp.up_proj.weight", "FD"),
    "ffn_down.weight": ("mlp.down_proj.weight", "DF"),
}
_BIASES: Table = {
    "attn_q.bias": ("self_attn.q_proj.bias", "Q"),
    "attn_k.bias": ("self_attn.k_proj.bias", "K"),
    "attn_v.bias": ("self_attn.v_proj.bias", "K"),
}
_QK_NORMS: Table = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "H"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "H"),
}
_NORM_BEFORE_MLP: Table = {"ffn_norm.weight": ("post_attention_layernorm.weight", "D")}
_GEMMA_NORMS: Table = {
    "post_attention_norm.weight": ("post_attention_layernorm.weight", "D"),
    "ffn_norm.weight": ("pre_feedforward_layernorm.weight", "D"),
    "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", "D"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """Differences between architectures; all else is shared."""

    model_type: str
    """Hugging Face's name."""
    model_class: str
    """Class name in transformers."""
    layer: Table
    """Tensors of a layer."""
    permuted_heads: bool = False
    """Whether the rows of q and k are interleaved, as llama.cpp's RoPE wants them for Llama."""
    norms_add_one: bool = False
    """Whether the file stores a norm's weight as 1 + w, and Hugging Face stores w."""


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", {**_LAYER, **_NORM_BEFORE_MLP}, permuted_heads=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", {**_LAYER, **_BIASES, **_NORM_BEFORE_MLP}),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**_LAYER, **_QK_NORMS, **_NORM_BEFORE_MLP}),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**_LAYER, **_QK_NORMS, **_GEMMA_NORMS},
        norms_add_one=True,
    ),
}
"""By llama.cpp's name."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a Hugging Face tensor comes from."""

    name: str
    """Name in the GGUF file."""
    shape: tuple[int, ...]
    add: float = 0.0
    """Added to each value."""
    interleaved_heads: int = 0
    """Number of heads whose rows are interleaved; 0: none."""

    def reorder(self, tensor: np.ndarray) -> np.ndarray:
        """Undoes the interleaving of the rows of each head.

        Hugging Face rotates row i of a head with row i + H/2, llama.cpp row 2i with row 2i + 1.
        """
        if not self.interleaved_heads:
            return tensor
        rows = np.arange(len(tensor)).reshape(self.interleaved_heads, -1, 2).swapaxes(1, 2)
        return tensor[rows.reshape(-1)]


def architecture(file: GgufFile) -> Architecture:
    """The architecture of a file. Raises UserError if it is not supported, or if the file is one of several parts."""
    name = file.architecture
    if name not in ARCHITECTURES:
        raise UserError(
            f"{file.path}: general.architecture={name!r} is not supported; choose a model of one of {', '.join(ARCHITECTURES)}"
        )
    if (parts := file.metadata.get("split.count", 1)) not in (0, 1):
        raise UserError(
            f"{file.path} is one of {parts} parts of a model; join them with `llama-gguf-split --merge` and give the result"
        )
    if experts := file.metadata.get(f"{name}.expert_count", 0):
        raise UserError(
            f"{file.path}: a mixture of {experts} experts ({name}.expert_count) is not supported; give a dense model"
        )
    return ARCHITECTURES[name]


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
    index, size = file.integer(name), len(file.metadata.get("tokenizer.ggml.tokens", ()))
    if index >= size:
        raise UserError(f"{file.path}: {name}={index} is not below the {size} tokens; {CONVERT_AGAIN}")
    return index


def tensor_sources(file: GgufFile, config: Mapping[str, Any]) -> dict[str, TensorSource]:
    """Where each Hugging Face tensor comes from, by its name.

    Raises:
        UserError: a tensor is missing or unexpected, or has another shape than the metadata say.
    """
    kind = architecture(file)
    heads, kv_heads, head_dim = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    sizes = {
        "V": config["vocab_size"],
        "D": config["hidden_size"],
        "F": config["intermediate_size"],
        "Q": heads * head_dim,
        "K": kv_heads * head_dim,
        "H": head_dim,
    }
    names = dict(_TOP)
    if config["tie_word_embeddings"]:
        del names["output.weight"]
    for layer in range(config["num_hidden_layers"]):
        for name, (hf_name, axes) in kind.layer.items():
            names[f"blk.{layer}.{name}"] = (f"model.layers.{layer}.{hf_name}", axes)
    _require_exactly(file, names)
    sources = {}
    for name, (hf_name, axes) in names.items():
        shape = tuple(sizes[axis] for axis in axes)
        if (actual := file.tensors[name].shape) != shape:
            raise UserError(
                f"{file.path}: tensor {name} has shape {actual}, but the metadata require {shape}; {CONVERT_AGAIN}"
            )
        interleaved = {"Q": heads, "K": kv_heads}[axes[0]] if _is_permuted(kind, name) else 0
        is_norm = name.endswith("norm.weight")
        sources[hf_name] = TensorSource(
            name, shape, -1.0 if is_norm and kind.norms_add_one else 0.0, interleaved
        )
    return sources


def _is_permuted(kind: Architecture, name: str) -> bool:
    return kind.permuted_heads and name.endswith((".attn_q.weight", ".attn_k.weight"))


def _require_exactly(file: GgufFile, names: Iterable[str]) -> None:
    known = set(names)
    allowed = known | ({ROPE_FACTORS} if file.architecture == "llama" else set())
    missing = [name for name in names if name not in file.tensors]
    extra = [name for name in file.tensors if name not in allowed]
    for problem, found, fix in (
        ("lacks the tensors", missing, "download the file again, or " + CONVERT_AGAIN),
        ("has tensors that rrl does not know", extra, "give another model of this architecture"),
    ):
        if found:
            more = f" and {len(found) - MAX_LISTED_NAMES} more" if len(found) > MAX_LISTED_NAMES else ""
            raise UserError(
                f"{file.path} ({file.architecture}) {problem} {', '.join(found[:MAX_LISTED_NAMES])}{more}; {fix}"
            )


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
    kind = settings.pop("type", "none")
    settings.pop("finetuned", None)
    known = {"none": {"factor"}, "linear": {"factor"}, "yarn": {"factor", "original_context_length"}}
    if kind not in known or settings.keys() - known[kind]:
        raise UserError(
            f"{file.path}: RoPE scaling {kind!r} with {', '.join(settings) or 'no settings'} is not supported; it must be "
            "none, linear (factor) or yarn (factor, original_context_length)"
        )
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": file.number(prefix + "factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.integer(prefix + "original_context_length", least=1)
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
    # Only the 27B model, which llama.cpp recognises by its layers, scales by hidden / heads; it has no key for it.
    scale = hidden // heads if layers == 62 else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale,
        "sliding_window": file.integer("gemma3.attention.sliding_window", least=1),
        "layer_types": [
            "sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)
        ],
        "rope_local_base_freq": file.number("gemma3.rope.freq_base_swa", 10_000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
