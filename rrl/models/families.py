"""Families of decoders: how they differ, which of their layers have a sliding window, and which models are refused."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from rrl.errors import UserError
from rrl.models.hf_fields import integer

Activation = Literal["silu", "gelu_pytorch_tanh"]
SLIDING, FULL = "sliding_attention", "full_attention"
"""Hugging Face's names of the two supported kinds of layers."""


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderFamily:
    """Differences between families of decoders; all else is shared."""

    architecture: str
    """Class name in transformers."""
    classifier: str
    """Class name in transformers of a model with a value head."""
    lineage: str
    """Name that the releases of a family share, such as Qwen for Qwen2.5 and Qwen3."""
    qkv_bias: bool = False
    """Whether q, k and v have biases."""
    qk_norm: bool = False
    """Whether each head of q and k is normalised before RoPE."""
    post_norms: bool = False
    """Whether the outputs of attention and MLP are normalised before they are added to the residual stream."""
    norms_add_one: bool = False
    """Whether a norm with the weights w multiplies by 1 + w instead of w."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by sqrt(hidden), rounded to the dtype of the computation."""
    activation: Activation = "silu"
    """Activation of the MLP's gate."""
    activation_field: str = "hidden_act"
    """Field of config.json with the activation."""
    windows: Literal["never", "optional", "always"] = "never"
    """Whether layers can have a sliding window: only if use_sliding_window is set (optional), or by a pattern (always)."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of fields that config.json may lack."""


GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""Defaults of transformers' Gemma3TextConfig. The config.json of gemma-3-4b-it has only the fields that differ from them."""
SLIDING_WINDOW_PATTERN = 6
"""Gemma 3: every sixth layer attends to all tokens, unless config.json has layer_types or sliding_window_pattern."""

DECODER_FAMILIES: Mapping[str, DecoderFamily] = {
    "llama": DecoderFamily("LlamaForCausalLM", "LlamaForSequenceClassification", "Llama"),
    "qwen2": DecoderFamily(
        "Qwen2ForCausalLM", "Qwen2ForSequenceClassification", "Qwen", qkv_bias=True, windows="optional"
    ),
    "qwen3": DecoderFamily(
        "Qwen3ForCausalLM", "Qwen3ForSequenceClassification", "Qwen", qk_norm=True, windows="optional"
    ),
    "gemma3_text": DecoderFamily(
        "Gemma3ForCausalLM",
        "Gemma3TextForSequenceClassification",
        "Gemma",
        qk_norm=True,
        post_norms=True,
        norms_add_one=True,
        scales_embeddings=True,
        activation="gelu_pytorch_tanh",
        activation_field="hidden_activation",
        windows="always",
        defaults=GEMMA3_DEFAULTS,
    ),
}

TEXT_PARTS = {"gemma3": "gemma3_text"}
"""model_type of a model with images -> that of its text part, which is in the field text_config."""

_REFUSED = {
    "mixtures of experts": ("_moe", "mixtral", "deepseek_v", "gpt_oss", "llama4", "olmoe", "dbrx"),
    "gated delta nets": ("qwen3_next", "qwen3_5", "olmo_hybrid"),
    "state space layers": ("mamba", "jamba", "bamba", "falcon_h1", "zamba", "granitemoehybrid"),
    "softcapped attention scores": ("gemma2",),
}
"""What is not supported -> substrings of the model_type of models that need it."""


def text_part(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the decoder, with the family's defaults for missing fields.

    Raises:
        UserError: the model_type is not supported, or a model with images has no text_config.
    """
    model_type = str(hf.get("model_type"))
    if model_type in TEXT_PARTS:
        text = hf.get("text_config")
        if not isinstance(text, Mapping):
            raise UserError(
                f"config.json: model_type={model_type!r} needs the object text_config, not {text!r}"
            )
        return text_part({"model_type": TEXT_PARTS[model_type], **text})
    if model_type not in DECODER_FAMILIES:
        why = next(
            (
                f" ({what} are not supported)"
                for what, parts in _REFUSED.items()
                if any(part in model_type for part in parts)
            ),
            "",
        )
        supported = ", ".join([*DECODER_FAMILIES, *TEXT_PARTS])
        raise UserError(
            f"config.json: model_type={model_type!r} is not supported{why}; choose one of {supported}"
        )
    return {**DECODER_FAMILIES[model_type].defaults, **hf}


def refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """Raises UserError if a decoder's config needs what is not supported."""
    family = DECODER_FAMILIES[hf["model_type"]]
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hf.get(field):
            raise UserError(f"config.json: {field}={hf[field]!r}: mixtures of experts are not supported")
    field = family.activation_field
    if (act := hf.get(field, family.activation)) != family.activation:
        raise UserError(f"config.json: {field}={act!r} is not supported; it must be {family.activation!r}")
    for field in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        if hf.get(field):
            raise UserError(
                f"config.json: {field}=true is not supported for model_type={hf['model_type']!r}; it must be false"
            )
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if hf.get(field):
            raise UserError(f"config.json: {field}={hf[field]!r} is not supported; it must be null")


def sliding_layers(hf: Mapping[str, Any]) -> tuple[tuple[bool, ...], int | None]:
    """Which layers have a sliding window, and its size in tokens; ((), None) if no layer has one.

    Raises:
        UserError: a layer's type is not supported, the number of types is not that of the layers, the family has no sliding
            windows, or layers slide although no window is set.
    """
    family, layers, types = (
        DECODER_FAMILIES[hf["model_type"]],
        integer(hf, "num_hidden_layers"),
        hf.get("layer_types"),
    )
    enabled = family.windows == "always" or bool(hf.get("use_sliding_window"))
    if types is None and family.windows == "always":
        pattern = integer(hf, "sliding_window_pattern", SLIDING_WINDOW_PATTERN)
        slides = tuple(bool((layer + 1) % pattern) for layer in range(layers))
    elif types is None:
        first = (
            integer(hf, "max_window_layers", 28, least=0) if enabled and hf.get("sliding_window") else layers
        )
        slides = tuple(layer >= first for layer in range(layers))
    else:
        if others := sorted(set(map(str, types)) - {FULL, SLIDING}):
            raise UserError(
                f"config.json: layer_types contains {', '.join(others)}, which is not supported; only {FULL!r} and "
                f"{SLIDING!r} are"
            )
        if len(types) != layers:
            raise UserError(
                f"config.json: layer_types has {len(types)} entries for num_hidden_layers={layers}"
            )
        slides = tuple(kind == SLIDING for kind in types)
    if not any(slides) and not (enabled and family.windows == "never"):
        return (), None
    if family.windows == "never":
        raise UserError(
            "config.json sets sliding-window attention (use_sliding_window or layer_types), which is not supported for "
            f"model_type={hf['model_type']!r}"
        )
    if not enabled or not hf.get("sliding_window"):
        raise UserError(
            f"config.json: layer_types contains {SLIDING!r}, but use_sliding_window={hf.get('use_sliding_window')!r} and "
            f"sliding_window={hf.get('sliding_window')!r} set no window"
        )
    return slides, integer(hf, "sliding_window")
