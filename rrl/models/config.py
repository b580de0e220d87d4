"""Shapes of decoders and encoders, read from and written to Hugging Face's config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rrl.errors import UserError, at_least, one_of
from rrl.models.hf_fields import end_ids, integer, positive, token_id
from rrl.models.rope_scaling import RopeScaling, YarnScaling, read_rope


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderFamily:
    """Differences between families of decoders; all else is shared."""

    architecture: str
    """Class name in transformers."""
    qkv_bias: bool
    """Whether q, k and v have biases."""
    qk_norm: bool
    """Whether each head of q and k is normalised before RoPE."""


DECODER_FAMILIES = {
    "llama": DecoderFamily("LlamaForCausalLM", qkv_bias=False, qk_norm=False),
    "qwen2": DecoderFamily("Qwen2ForCausalLM", qkv_bias=True, qk_norm=False),
    "qwen3": DecoderFamily("Qwen3ForCausalLM", qkv_bias=False, qk_norm=True),
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    vocab_size: int
    hidden: int
    """Width D of the residual stream."""
    layers: int
    heads: int
    """Query heads N."""
    kv_heads: int
    """Key and value heads K; divides `heads`."""
    head_dim: int
    """Head dimension H; may differ from hidden / heads."""
    mlp: int
    """Width F of the SwiGLU layer."""
    model_type: str = "qwen2"
    """A key of DECODER_FAMILIES; sets whether q, k and v have biases (Qwen2) or q and k have norms (Qwen3)."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_eps: float = 1e-6
    tie_embeddings: bool = True
    max_positions: int = 4096
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    """Token that ends a text; a tuple if the model has several."""
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.model_type not in DECODER_FAMILIES:
            raise UserError(
                f"model_type={self.model_type!r} is not supported; choose one of {', '.join(DECODER_FAMILIES)}"
            )
        at_least(
            1, self, "vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "mlp", "max_positions"
        )
        if self.heads % self.kv_heads:
            raise UserError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; change one of them"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} is odd; rotary positions need an even head_dim")

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases."""
        return DECODER_FAMILIES[self.model_type].qkv_bias

    @property
    def qk_norm(self) -> bool:
        """Whether each head of q and k is normalised before RoPE."""
        return DECODER_FAMILIES[self.model_type].qk_norm

    @property
    def max_context(self) -> int:
        """Maximum number of tokens of a text. YaRN extends it beyond `max_positions`, which may be that of pretraining."""
        if isinstance(self.rope_scaling, YarnScaling):
            extended = int(self.rope_scaling.factor * self.rope_scaling.original_max_position_embeddings)
            return max(self.max_positions, extended)
        return self.max_positions

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "DecoderConfig":
        """Reads the config.json of transformers 4 or 5.

        Args:
            hf: the content of config.json.
            generation: the content of generation_config.json, whose end tokens are added. Qwen2.5-Instruct and Llama 3
                list some end tokens only there.

        Raises:
            UserError: model_type is unknown; a field is missing or has the wrong type; or the config needs something
                unsupported: sliding windows, other RoPE scalings, other activations or other biases.
        """
        model_type = hf.get("model_type")
        if model_type not in DECODER_FAMILIES:
            raise UserError(
                f"config.json: model_type={model_type!r} is not supported; choose one of {', '.join(DECODER_FAMILIES)}"
            )
        _refuse_unsupported(hf)
        heads, hidden = integer(hf, "num_attention_heads"), integer(hf, "hidden_size")
        max_positions = integer(hf, "max_position_embeddings")
        theta, scaling = _rope(hf, max_positions)
        ends = dict.fromkeys([*end_ids(hf), *end_ids(generation or {}, "generation_config.json")])
        return cls(
            vocab_size=integer(hf, "vocab_size"),
            hidden=hidden,
            layers=integer(hf, "num_hidden_layers"),
            heads=heads,
            kv_heads=integer(hf, "num_key_value_heads", heads),
            head_dim=integer(hf, "head_dim", hidden // heads),
            mlp=integer(hf, "intermediate_size"),
            model_type=model_type,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_eps=positive(hf, "rms_norm_eps", 1e-6),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            max_positions=max_positions,
            bos_token_id=token_id(hf, "bos_token_id"),
            eos_token_id=tuple(ends) if len(ends) > 1 else next(iter(ends), None),
            pad_token_id=token_id(hf, "pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that transformers and vLLM read."""
        hf: dict[str, Any] = {
            "architectures": [DECODER_FAMILIES[self.model_type].architecture],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else self.rope_scaling.to_hf(),
            "rms_norm_eps": self.rms_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_positions,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_id)
            if isinstance(self.eos_token_id, tuple)
            else self.eos_token_id,
            "pad_token_id": self.pad_token_id,
        }
        if self.model_type != "qwen2":
            hf["attention_bias"] = False
        return hf


def matrix_parameters(config: DecoderConfig) -> float:
    """Number of weights that each token is multiplied with, without embedding and head."""
    attention = 2 * config.hidden * (config.heads + config.kv_heads) * config.head_dim
    return float(config.layers * (attention + 3 * config.hidden * config.mlp))


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderFamily:
    """Differences between families of encoders; all else is shared."""

    architecture: str
    """Class name in transformers."""
    prefix: str
    """Prefix of the tensors' names in a checkpoint of a class with a task head, such as BertForMaskedLM."""
    pad_token_id: int
    """Used if config.json has none."""
    positions_follow_padding: bool
    """Whether position ids start at pad_token_id + 1 and skip padding; otherwise they are 0, 1, 2, ..."""


ENCODER_FAMILIES = {
    "bert": EncoderFamily("BertModel", "bert.", pad_token_id=0, positions_follow_padding=False),
    "roberta": EncoderFamily("RobertaModel", "roberta.", pad_token_id=1, positions_follow_padding=True),
    "xlm-roberta": EncoderFamily(
        "XLMRobertaModel", "roberta.", pad_token_id=1, positions_follow_padding=True
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Pooling:
    """How an embedding is computed from the hidden states of a text."""

    mode: str = "mean"
    """mean: the mean over the text's tokens; cls: the first token."""
    normalize: bool = True
    """Whether embeddings are scaled to norm 1."""

    def __post_init__(self) -> None:
        one_of(("mean", "cls"), self, "mode", where="pooling ")
        if not isinstance(self.normalize, bool):
            raise UserError(f"normalize={self.normalize!r} must be true or false")


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Shape of a BERT-like encoder (post-LayerNorm, learned positions, GELU) and its pooling."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    mlp: int
    max_positions: int = 512
    """Rows of the position table. RoBERTa allows fewer tokens, see `max_tokens`."""
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    model_type: str = "bert"
    """A key of ENCODER_FAMILIES."""
    pooling: Pooling = Pooling()
    """Not part of config.json; the caller sets it."""

    def __post_init__(self) -> None:
        if self.model_type not in ENCODER_FAMILIES:
            raise UserError(
                f"model_type={self.model_type!r} is not a supported encoder; choose one of {', '.join(ENCODER_FAMILIES)}"
            )
        at_least(
            1, self, "vocab_size", "hidden", "layers", "heads", "mlp", "max_positions", "type_vocab_size"
        )
        if self.hidden % self.heads:
            raise UserError(
                f"hidden={self.hidden} is not a multiple of heads={self.heads}; change one of them"
            )
        if self.max_tokens < 1:
            raise UserError(
                f"max_positions={self.max_positions} leaves no position after pad_token_id={self.pad_token_id}"
            )

    @property
    def head_dim(self) -> int:
        """Head dimension H."""
        return self.hidden // self.heads

    @property
    def embedding_dim(self) -> int:
        """Length of an embedding, E."""
        return self.hidden

    @property
    def positions_follow_padding(self) -> bool:
        """Whether position ids start at pad_token_id + 1 and skip padding."""
        return ENCODER_FAMILIES[self.model_type].positions_follow_padding

    @property
    def max_tokens(self) -> int:
        """Length of the longest text in tokens, including special tokens."""
        return self.max_positions - (self.pad_token_id + 1 if self.positions_follow_padding else 0)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], pooling: Pooling = Pooling()) -> "EncoderConfig":
        """Reads config.json.

        Raises:
            UserError: model_type is unknown; a field is missing or has the wrong type; or activation, position embedding or
                attention mask differ from BERT's.
        """
        model_type = hf.get("model_type")
        if model_type not in ENCODER_FAMILIES:
            raise UserError(
                f"config.json: model_type={model_type!r} is not a supported encoder; "
                f"choose one of {', '.join(ENCODER_FAMILIES)}"
            )
        if (act := hf.get("hidden_act", "gelu")) != "gelu":
            raise UserError(f"config.json: hidden_act={act!r} is not supported; it must be 'gelu'")
        if (kind := hf.get("position_embedding_type", "absolute")) != "absolute":
            raise UserError(
                f"config.json: position_embedding_type={kind!r} is not supported; it must be 'absolute'"
            )
        if hf.get("is_decoder"):
            raise UserError(
                "config.json: is_decoder=true is not supported, since an encoder's tokens attend in both directions; "
                "it must be false"
            )
        return cls(
            vocab_size=integer(hf, "vocab_size"),
            hidden=integer(hf, "hidden_size"),
            layers=integer(hf, "num_hidden_layers"),
            heads=integer(hf, "num_attention_heads"),
            mlp=integer(hf, "intermediate_size"),
            max_positions=integer(hf, "max_position_embeddings"),
            type_vocab_size=integer(hf, "type_vocab_size", 2),
            layer_norm_eps=positive(hf, "layer_norm_eps", 1e-12),
            pad_token_id=integer(hf, "pad_token_id", ENCODER_FAMILIES[model_type].pad_token_id, least=0),
            model_type=model_type,
            pooling=pooling,
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that transformers reads."""
        return {
            "architectures": [ENCODER_FAMILIES[self.model_type].architecture],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.mlp,
            "hidden_act": "gelu",
            "max_position_embeddings": self.max_positions,
            "type_vocab_size": self.type_vocab_size,
            "layer_norm_eps": self.layer_norm_eps,
            "pad_token_id": self.pad_token_id,
            "position_embedding_type": "absolute",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    if hf.get("use_sliding_window") or "sliding_attention" in (hf.get("layer_types") or ()):
        raise UserError(
            f"config.json sets sliding-window attention (use_sliding_window or layer_types; sliding_window="
            f"{hf.get('sliding_window')!r}), which is not supported; only models with full attention can be loaded"
        )
    if others := sorted(set(map(str, hf.get("layer_types") or ())) - {"full_attention"}):
        raise UserError(
            f"config.json: layer_types contains {', '.join(others)}, which is not supported; all must be 'full_attention'"
        )
    if (act := hf.get("hidden_act", "silu")) != "silu":
        raise UserError(f"config.json: hidden_act={act!r} is not supported; it must be 'silu'")
    for field in ("attention_bias", "mlp_bias"):
        if hf.get(field):
            raise UserError(
                f"config.json: {field}=true is not supported for model_type={hf['model_type']!r}; it must be false"
            )


def _rope(hf: Mapping[str, Any], max_positions: int) -> tuple[float, RopeScaling | None]:
    """RoPE base and scaling, from transformers 5's rope_parameters or transformers 4's rope_theta and rope_scaling."""
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    rope = hf.get(name) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(
            f"config.json: {name}={rope!r} is not supported; it must be one object for all layers"
        )
    for fields in (rope, hf):
        if (share := fields.get("partial_rotary_factor")) not in (None, 1):
            raise UserError(f"config.json: partial_rotary_factor={share!r} is not supported; it must be 1")
    return read_rope(rope, positive(hf, "rope_theta", 10_000.0), max_positions)
