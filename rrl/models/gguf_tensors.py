"""The architectures that can be imported from GGUF, and the source of each Hugging Face tensor. Read `tensor_sources` first."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rrl.errors import UserError
from rrl.models.gguf_file import CONVERT_AGAIN, GgufFile
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
