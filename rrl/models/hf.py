"""Hugging Face folders in and out: which tensor of theirs is which parameter of ours."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from transformers import PreTrainedTokenizerBase

from rrl.data.tokenizer import check_tokenizer, load_tokenizer
from rrl.errors import UserError
from rrl.models.config import ENCODER_FAMILIES, DecoderConfig, EncoderConfig, Pooling
from rrl.models.decoder import Decoder, Remat
from rrl.models.encoder import Encoder
from rrl.models.lora import merged
from rrl.models.weights import Weights, folder_hash, read_config, write_folder, write_json
from rrl.parallel.rules import RULES, shardings

__all__ = [
    "folder_hash",
    "load_decoder",
    "load_encoder",
    "load_language_model",
    "save_decoder",
    "save_encoder",
]

LISTED = 8
"""Names in one error message, at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One row of a name table."""

    ours: str
    """Path of the parameter; those under "layers." are stacked."""
    theirs: str
    """Name of the tensor; {} is the layer."""
    inputs: int | None = None
    """How many of our leading axes a matrix contracts over: theirs is [outputs, inputs]. None: the same, flattened."""

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """From the shape of ours, without the layer axis."""
        if self.inputs is None:
            return shape
        return tuple(math.prod(part) for part in (shape[self.inputs :], shape[: self.inputs]) if part)

    def to_ours(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Their tensor in our shape."""
        return (tensor.T if self.inputs else tensor).reshape(shape)

    def to_theirs(self, parameter: np.ndarray) -> np.ndarray:
        """Our parameter (of one layer) in their shape."""
        theirs = self.their_shape(parameter.shape)
        return parameter.reshape(theirs[::-1]).T if self.inputs else parameter.reshape(theirs)


_DECODER = (
    Entry("embedding", "model.embed_tokens.weight"),
    Entry("norm", "model.norm.weight"),
    Entry("head", "lm_head.weight", inputs=1),
    Entry("layers.attention_norm", "model.layers.{}.input_layernorm.weight"),
    Entry("layers.q", "model.layers.{}.self_attn.q_proj.weight", inputs=1),
    Entry("layers.k", "model.layers.{}.self_attn.k_proj.weight", inputs=1),
    Entry("layers.v", "model.layers.{}.self_attn.v_proj.weight", inputs=1),
    Entry("layers.q_bias", "model.layers.{}.self_attn.q_proj.bias", inputs=0),
    Entry("layers.k_bias", "model.layers.{}.self_attn.k_proj.bias", inputs=0),
    Entry("layers.v_bias", "model.layers.{}.self_attn.v_proj.bias", inputs=0),
    Entry("layers.q_norm", "model.layers.{}.self_attn.q_norm.weight"),
    Entry("layers.k_norm", "model.layers.{}.self_attn.k_norm.weight"),
    Entry("layers.o", "model.layers.{}.self_attn.o_proj.weight", inputs=2),
    Entry("layers.mlp_norm", "model.layers.{}.post_attention_layernorm.weight"),
    Entry("layers.gate", "model.layers.{}.mlp.gate_proj.weight", inputs=1),
    Entry("layers.up", "model.layers.{}.mlp.up_proj.weight", inputs=1),
    Entry("layers.down", "model.layers.{}.mlp.down_proj.weight", inputs=1),
)
_DECODER_IGNORED = re.compile(r".*rotary_emb\.inv_freq")
_TIED_HEAD = re.compile(r".*rotary_emb\.inv_freq|lm_head\.weight")

_ENCODER = (
    Entry("embedding", "embeddings.word_embeddings.weight"),
    Entry("position_embedding", "embeddings.position_embeddings.weight"),
    Entry("type_embedding", "embeddings.token_type_embeddings.weight"),
    Entry("norm", "embeddings.LayerNorm.weight"),
    Entry("norm_bias", "embeddings.LayerNorm.bias"),
    Entry("layers.q", "encoder.layer.{}.attention.self.query.weight", inputs=1),
    Entry("layers.k", "encoder.layer.{}.attention.self.key.weight", inputs=1),
    Entry("layers.v", "encoder.layer.{}.attention.self.value.weight", inputs=1),
    Entry("layers.q_bias", "encoder.layer.{}.attention.self.query.bias", inputs=0),
    Entry("layers.k_bias", "encoder.layer.{}.attention.self.key.bias", inputs=0),
    Entry("layers.v_bias", "encoder.layer.{}.attention.self.value.bias", inputs=0),
    Entry("layers.o", "encoder.layer.{}.attention.output.dense.weight", inputs=2),
    Entry("layers.o_bias", "encoder.layer.{}.attention.output.dense.bias"),
    Entry("layers.attention_norm", "encoder.layer.{}.attention.output.LayerNorm.weight"),
    Entry("layers.attention_norm_bias", "encoder.layer.{}.attention.output.LayerNorm.bias"),
    Entry("layers.up", "encoder.layer.{}.intermediate.dense.weight", inputs=1),
    Entry("layers.up_bias", "encoder.layer.{}.intermediate.dense.bias"),
    Entry("layers.down", "encoder.layer.{}.output.dense.weight", inputs=1),
    Entry("layers.down_bias", "encoder.layer.{}.output.dense.bias"),
    Entry("layers.mlp_norm", "encoder.layer.{}.output.LayerNorm.weight"),
    Entry("layers.mlp_norm_bias", "encoder.layer.{}.output.LayerNorm.bias"),
)
# The pooler and the pretraining heads are not part of a text encoder; old files hold a buffer of positions.
_ENCODER_IGNORED = re.compile(r"pooler\..*|cls\..*|lm_head\..*|embeddings\.position_ids")


def load_decoder(
    folder: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    remat: Remat = "none",
) -> Decoder:
    """Opens a Hugging Face folder of a Qwen2, Qwen3 or Llama model.

    Args:
        folder: holds config.json and safetensors weights, in one file or sharded.
        dtype: of the computation.
        param_dtype: parameters are converted to it.
        mesh: parameters are sharded over it by `rrl.parallel.rules`; None: all on the default device.
        remat: see `Decoder`.

    Raises:
        UserError: naming the file, the tensor and its expected and found shape, or the field that is not supported.
    """
    config = DecoderConfig.from_hf(read_config(folder))
    ignored = _TIED_HEAD if config.tie_embeddings else _DECODER_IGNORED
    abstract = nnx.eval_shape(
        lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype, remat=remat)
    )
    return _load(folder, abstract, _DECODER, ignored, mesh)


def load_language_model(
    folder: str | Path, field: str, *, chat: bool = True
) -> tuple[Decoder, PreTrainedTokenizerBase]:
    """A decoder and its tokenizer from one folder, which `field` (policy, reader, ...) of a config or call names.

    Raises:
        UserError: as `load_decoder`; a tokenizer that is not the model's, or (with `chat`) without a chat template.
    """
    tokenizer = load_tokenizer(folder)
    check_tokenizer(tokenizer, DecoderConfig.from_hf(read_config(folder)), field, chat=chat)
    return load_decoder(folder), tokenizer


def save_decoder(
    folder: str | Path, decoder: Decoder, tokenizer: Any = None, *, dtype: DTypeLike = jnp.float32
) -> None:
    """Writes a folder that transformers and vLLM load, with the tokenizer's files if it is given; adapters are merged."""
    decoder = merged(decoder)
    hf = decoder.config.to_hf() | {"dtype": jnp.dtype(dtype).name}
    write_folder(folder, hf, _export(decoder, _DECODER, dtype))
    ids = {
        name: hf[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if hf[name] is not None
    }
    write_json(Path(folder) / "generation_config.json", ids)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def load_encoder(
    folder: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    pooling: Pooling | None = None,
) -> Encoder:
    """Opens a Hugging Face folder of a BERT, RoBERTa or XLM-RoBERTa (E5, BGE, MiniLM, ...).

    config.json does not tell the pooling (None: mean, unit length); `load_text_encoder` finds it. The other arguments and
    the errors are those of `load_decoder`.
    """
    config = EncoderConfig.from_hf(read_config(folder), pooling or Pooling())
    prefix = ENCODER_FAMILIES[config.model_type].prefix
    abstract = nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype))
    return _load(folder, abstract, _ENCODER, _ENCODER_IGNORED, mesh, prefix)


def save_encoder(
    folder: str | Path, encoder: Encoder, tokenizer: Any = None, *, dtype: DTypeLike = jnp.float32
) -> None:
    """Writes a folder that transformers' AutoModel loads (without a pooler), with the tokenizer's files if given."""
    write_folder(
        folder, encoder.config.to_hf() | {"dtype": jnp.dtype(dtype).name}, _export(encoder, _ENCODER, dtype)
    )
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _load(
    folder: str | Path,
    abstract: Any,
    table: Sequence[Entry],
    ignored: re.Pattern[str],
    mesh: Mesh | None,
    prefix: str = "",
) -> Any:
    """Fills an abstract module from a folder; checks every name and shape before the first tensor is read."""
    graph, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    placed = None if mesh is None else shardings(state, mesh, RULES)
    entries = {tuple(entry.ours.split(".")): entry for entry in table}
    with Weights(folder) as weights:
        found = {name.removeprefix(prefix): name for name in weights.names()}
        _check(folder, weights, found, {path: (entries[path], flat[path].shape) for path in flat}, ignored)
        for path, variable in flat.items():
            entry, value = entries[path], np.empty(variable.shape, variable.dtype)
            if path[0] == "layers":
                for layer in range(len(value)):
                    value[layer] = entry.to_ours(
                        weights.read(found[entry.theirs.format(layer)]), value.shape[1:]
                    )
            else:
                value[...] = entry.to_ours(weights.read(found[entry.theirs]), value.shape)
            place = None if placed is None else placed[path]
            flat[path] = variable.replace(jax.device_put(value, place))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _check(
    folder: str | Path,
    weights: Weights,
    found: Mapping[str, str],
    wanted: Mapping[tuple[str, ...], tuple[Entry, tuple[int, ...]]],
    ignored: re.Pattern[str],
) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for path, (entry, shape) in wanted.items():
        if path[0] == "layers":
            expected |= {entry.theirs.format(i): entry.their_shape(shape[1:]) for i in range(shape[0])}
        else:
            expected[entry.theirs] = entry.their_shape(shape)
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected and not ignored.fullmatch(name)]
    for what, names in (("lack tensors that", missing), ("hold tensors that do not belong to what", extra)):
        if names:
            more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
            raise UserError(
                f"{folder}: the weights {what} config.json describes: {', '.join(names[:LISTED])}{more}; "
                "use the config.json that belongs to these weights"
            )
    for name, shape in expected.items():
        if (actual := weights.shape(found[name])) != shape:
            raise UserError(
                f"{weights.file(found[name])}: tensor {found[name]} has shape {actual}, but config.json asks for {shape}; "
                "use the config.json that belongs to these weights"
            )


def _export(model: nnx.Module, table: Sequence[Entry], dtype: DTypeLike) -> dict[str, np.ndarray]:
    flat = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    tensors: dict[str, np.ndarray] = {}
    for entry in table:
        variable = flat.get(tuple(entry.ours.split(".")))
        if variable is None:
            continue
        value = np.asarray(jax.device_get(variable[...])).astype(jnp.dtype(dtype))
        if entry.ours.startswith("layers."):
            tensors |= {entry.theirs.format(i): entry.to_theirs(layer) for i, layer in enumerate(value)}
        else:
            tensors[entry.theirs] = entry.to_theirs(value)
    return tensors
