"""Shapes of decoders and encoders, read from and written to Hugging Face's config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rrl.errors import UserError, at_least, one_of
from rrl.models.families import (
    DECODER_FAMILIES,
    FULL,
    SLIDING,
    DecoderFamily,
    refuse_unsupported,
    sliding_layers,
    text_part,
)
from rrl.models.hf_fields import end_ids, integer, positive, token_id
from rrl.models.rope_scaling import RopeScaling, YarnScaling, read_rope

NO_WINDOW = 2**30
"""Window of a layer without one: more than any number of tokens."""
_OF_SOME_FAMILIES = {
    "local_rope_theta": "rope_local_base_freq",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
}
"""Fields that only some families have: name in DecoderConfig -> name in config.json. A family has such a field if
`DecoderFamily.defaults` contains the latter name. The field is then required; otherwise it must be None."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder: RMSNorm, RoPE, grouped-query attention, gated MLP."""

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
    """Width F of the gated MLP."""
    model_type: str = "qwen2"
    """A key of DECODER_FAMILIES, which lists how the families differ."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    """RoPE base of the sliding layers, which have no scaling then; None: base and scaling are those of the other layers."""
    sliding_window: int | None = None
    """Number of tokens, itself included, that a token of a sliding layer attends to."""
    sliding_layers: tuple[bool, ...] = ()
    """Whether each layer has the sliding window; (): no layer has one."""
    query_pre_attn_scalar: int | None = None
    """Attention scores are scaled by the inverse square root of this; None: of `head_dim`."""
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
        if self.sliding_layers and len(self.sliding_layers) != self.layers:
            raise UserError(f"sliding_layers has {len(self.sliding_layers)} entries for layers={self.layers}")
        if any(self.sliding_layers) != (self.sliding_window is not None):
            raise UserError(
                f"sliding_window={self.sliding_window} does not fit sliding_layers={self.sliding_layers}: set both or none"
            )
        if self.sliding_window is not None:
            at_least(1, self, "sliding_window")
        for field, hf_field in _OF_SOME_FAMILIES.items():
            if (getattr(self, field) is None) == (hf_field in self.family.defaults):
                raise UserError(
                    f"{field}={getattr(self, field)} does not fit model_type={self.model_type!r}, which "
                    f"{'needs' if hf_field in self.family.defaults else 'cannot have'} one"
                )
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} is odd; rotary positions need an even head_dim")

    @property
    def family(self) -> DecoderFamily:
        """How the model differs from other families."""
        return DECODER_FAMILIES[self.model_type]

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases."""
        return self.family.qkv_bias

    @property
    def qk_norm(self) -> bool:
        """Whether each head of q and k is normalised before RoPE."""
        return self.family.qk_norm

    @property
    def windows(self) -> tuple[int, ...]:
        """Number of tokens that a token of each layer attends to at most; () if all layers attend to all tokens."""
        return tuple((self.sliding_window or 0) if slides else NO_WINDOW for slides in self.sliding_layers)

    def first_layers(self, count: int) -> "DecoderConfig":
        """The config of a model with only the first `count` layers."""
        slides = self.sliding_layers[:count]
        window = self.sliding_window if any(slides) else None
        return dataclasses.replace(
            self, layers=count, sliding_layers=slides if any(slides) else (), sliding_window=window
        )

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
                unsupported: experts, other kinds of layers, RoPE scalings, activations or biases.
        """
        files = [hf, *([hf["text_config"]] if isinstance(hf.get("text_config"), Mapping) else [])]
        ends = dict.fromkeys([end for file in files for end in end_ids(file)])
        hf = text_part(hf)
        refuse_unsupported(hf)
        heads, hidden = integer(hf, "num_attention_heads"), integer(hf, "hidden_size")
        max_positions = integer(hf, "max_position_embeddings")
        theta, scaling, local_theta = _rope(hf, max_positions)
        slides, window = sliding_layers(hf)
        ends = dict.fromkeys([*(ends or end_ids(hf)), *end_ids(generation or {}, "generation_config.json")])
        return cls(
            vocab_size=integer(hf, "vocab_size"),
            hidden=hidden,
            layers=integer(hf, "num_hidden_layers"),
            heads=heads,
            kv_heads=integer(hf, "num_key_value_heads", heads),
            head_dim=integer(hf, "head_dim", hidden // heads),
            mlp=integer(hf, "intermediate_size"),
            model_type=hf["model_type"],
            rope_theta=theta,
            rope_scaling=scaling,
            local_rope_theta=local_theta,
            sliding_window=window,
            sliding_layers=slides,
            query_pre_attn_scalar=integer(hf, "query_pre_attn_scalar")
            if hf.get("query_pre_attn_scalar")
            else None,
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
            "architectures": [self.family.architecture],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp,
            self.family.activation_field: self.family.activation,
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
        for field, hf_field in _OF_SOME_FAMILIES.items():
            if getattr(self, field) is not None:
                hf[hf_field] = getattr(self, field)
        return hf | self._windows_to_hf()

    def _windows_to_hf(self) -> dict[str, Any]:
        """The fields of config.json that describe sliding windows.

        Empty if no layer has a window, except for a family whose default config has windows.
        """
        slides = self.sliding_layers or (False,) * self.layers
        hf: dict[str, Any] = {"layer_types": [SLIDING if slide else FULL for slide in slides]}
        if self.family.windows == "always":
            return hf | {"sliding_window": self.sliding_window or NO_WINDOW}
        if not any(slides):
            return {}
        return hf | {
            "use_sliding_window": True,
            "sliding_window": self.sliding_window,
            "max_window_layers": slides.index(True),
        }


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


def _rope(hf: Mapping[str, Any], max_positions: int) -> tuple[float, RopeScaling | None, float | None]:
    """RoPE base and scaling, and the base of sliding layers if it is a separate one.

    transformers 5 has them in rope_parameters, for Gemma 3 one object for each type of layer; transformers 4 has rope_theta,
    rope_scaling and rope_local_base_freq.
    """
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    rope, local = hf.get(name) or {}, hf.get("rope_local_base_freq")
    separate = local is not None
    local_rope: Any = {}
    if separate and name == "rope_parameters" and isinstance(rope, Mapping):
        rope, local_rope = rope.get(FULL) or {}, rope.get(SLIDING) or {}
    for part in (rope, local_rope):
        if not isinstance(part, Mapping) or any(isinstance(value, Mapping) for value in part.values()):
            raise UserError(
                f"config.json: {name}={hf[name]!r} is not supported; it must be one object for all layers"
            )
    for fields in (rope, local_rope, hf):
        if (share := fields.get("partial_rotary_factor")) not in (None, 1):
            raise UserError(f"config.json: partial_rotary_factor={share!r} is not supported; it must be 1")
    theta, scaling = read_rope(rope, positive(hf, "rope_theta", 10_000.0), max_positions)
    if not separate:
        return theta, scaling, None
    local_theta, local_scaling = read_rope(local_rope, positive(hf, "rope_local_base_freq"), max_positions)
    if local_scaling is not None:
        raise UserError(f"config.json: {name} scales RoPE of {SLIDING!r} layers, which is not supported")
    return theta, scaling, local_theta
