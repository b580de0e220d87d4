"""Hugging Face folders in and out: which tensor of theirs is which parameter of ours."""

import collections
import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from transformers import PreTrainedTokenizerBase

from rrl.errors import UserError
from rrl.models.attention_backends import AttentionBackend
from rrl.models.config import ENCODER_FAMILIES, DecoderConfig, EncoderConfig, Pooling
from rrl.models.decoder import Decoder, Remat
from rrl.models.encoder import Encoder
from rrl.models.heads import ValueModel
from rrl.models.lora import merge_lora
from rrl.models.tokenizer import check_tokenizer, load_tokenizer
from rrl.models.transfer import Entry, export, load, shapes
from rrl.models.weights import (
    CONFIG_FILE,
    GENERATION,
    SHARD_SIZE,
    SafetensorsFolder,
    folder_hash,
    read_config,
    read_generation_config,
    write_folder,
    write_json,
)

COMPARED = 4096
"""Rows of two tensors that are compared at a time."""

Body = TypeVar("Body", bound=Decoder)

__all__ = [
    "folder_hash",
    "load_decoder",
    "load_encoder",
    "load_language_model",
    "load_value_model",
    "read_decoder_config",
    "read_encoder_config",
    "save_config_and_tokenizer",
    "save_decoder",
    "save_encoder",
]

_DECODER = (
    Entry("embedding", "model.embed_tokens.weight"),
    Entry("norm", "model.norm.weight"),
    Entry("head", "lm_head.weight", inputs=1),
    Entry("score", "score.weight", inputs=1),
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
_DECODER_IGNORED = r".*rotary_emb\.inv_freq"
_TIED_HEAD = r".*rotary_emb\.inv_freq|lm_head\.weight"

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


def read_decoder_config(folder: str | Path) -> DecoderConfig:
    """The shape of the decoder in a folder, and all ends of a text that its config.json and generation_config.json name.

    Raises UserError as `DecoderConfig.from_hf`, with the folder's name.
    """
    with _of(folder):
        return DecoderConfig.from_hf(read_config(folder), read_generation_config(folder))


def read_encoder_config(folder: str | Path, pooling: Pooling | None = None) -> EncoderConfig:
    """The shape of the encoder in a folder; UserError as from `EncoderConfig.from_hf`, with the folder's name."""
    with _of(folder):
        return EncoderConfig.from_hf(read_config(folder), pooling or Pooling())


@contextlib.contextmanager
def _of(folder: str | Path) -> Iterator[None]:
    """Errors within the block say which folder they are about."""
    try:
        yield
    except UserError as error:
        named = str(folder) in str(error)
        raise UserError(str(error) if named else f"{folder}: {error}") from error


def load_decoder(
    folder: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    attention: AttentionBackend = "xla",
    remat: Remat = "none",
) -> Decoder:
    """Opens a Hugging Face folder of a Qwen2, Qwen3 or Llama model.

    Args:
        folder: holds config.json and safetensors weights, in one file or sharded.
        dtype: of the computation.
        param_dtype: parameters are converted to it.
        mesh: parameters are sharded over it by `rrl.parallel.rules`; None: all on the default device.
        attention, remat: see `Decoder`.

    Raises:
        UserError: naming the file, the tensor and its expected and found shape, or the field that is not supported.
    """
    return _open(Decoder, folder, dtype, param_dtype, mesh, attention, remat)


def load_value_model(
    folder: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    attention: AttentionBackend = "xla",
    remat: Remat = "none",
    layers: int = 0,
) -> ValueModel:
    """Opens a ...ForSequenceClassification folder with one label, or a language model, whose new head starts at 0.

    Arguments and errors as for `load_decoder`; `layers` are how many are taken, from the first (0: all).
    """
    weights = SafetensorsFolder(folder)
    shape = weights.shape("score.weight") if "score.weight" in weights.names() else (1,)
    if shape[0] != 1:
        raise UserError(
            f"{weights.file('score.weight')}: tensor score.weight {shape} has {shape[0]} labels, but a value model has one; "
            "give a ...ForSequenceClassification with num_labels=1, or a language model, whose new head starts at 0"
        )
    return _open(ValueModel, folder, dtype, param_dtype, mesh, attention, remat, layers)


def _open(
    kind: type[Body],
    folder: str | Path,
    dtype: DTypeLike,
    param_dtype: DTypeLike,
    mesh: Mesh | None,
    attention: AttentionBackend,
    remat: Remat,
    layers: int = 0,
) -> Body:
    """A decoder or what is built on one, of the first `layers` (0: all)."""
    whole = read_decoder_config(folder)
    if not 0 <= layers <= whole.layers:
        raise UserError(
            f"{folder} has {whole.layers} layers; give 0 (all of them) to so many, not layers={layers}"
        )
    config = dataclasses.replace(whole, layers=layers or whole.layers)
    if kind is not ValueModel and config.tie_embeddings and _head_differs(folder):
        config = dataclasses.replace(config, tie_embeddings=False)
    abstract = nnx.eval_shape(
        lambda: kind(
            config,
            rngs=nnx.Rngs(0),
            dtype=dtype,
            param_dtype=param_dtype,
            attention=attention,
            remat=remat,
        )
    )
    ignored = [_DECODER_IGNORED if hasattr(abstract, "head") else _TIED_HEAD]
    ignored += [rf"model\.layers\.{layer}\..*" for layer in range(config.layers, whole.layers)]
    return load(folder, abstract, _DECODER, re.compile("|".join(ignored)), mesh, optional=["score.weight"])


def _head_differs(folder: str | Path) -> bool:
    """Whether a folder has both an embedding and an output head, with different values: then they are two tensors, whatever
    tie_word_embeddings says, as for transformers 5. Logs it."""
    weights, names = SafetensorsFolder(folder), ("model.embed_tokens.weight", "lm_head.weight")
    if not set(names) <= set(weights.names()):
        return False
    embedding, head = names
    rows = weights.shape(embedding)[0]
    if weights.shape(head) == weights.shape(embedding) and all(
        np.array_equal(weights.read(embedding, part), weights.read(head, part))
        for at in range(0, rows, COMPARED)
        for part in [(slice(at, at + COMPARED),)]
    ):
        return False
    logging.getLogger(__name__).warning(
        "%s: config.json has tie_word_embeddings=true, but the weights hold a %s that differs from %s; both are used, as "
        "transformers 5 does. Set tie_word_embeddings to false there.",
        folder,
        head,
        embedding,
    )
    return True


def load_language_model(
    folder: str | Path,
    field: str,
    *,
    chat: bool = True,
    context: int = 0,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    attention: AttentionBackend = "xla",
    remat: Remat = "none",
) -> tuple[Decoder, PreTrainedTokenizerBase]:
    """A decoder (see `load_decoder`) and its tokenizer from one folder, which `field` (policy, reader, ...) names.

    Raises:
        UserError: as `load_decoder`; a tokenizer that is not the model's, or (with `chat`) without a chat template; a
            `context` longer than the model's.
    """
    tokenizer, config = load_tokenizer(folder), read_decoder_config(folder)
    check_tokenizer(tokenizer, config, field, chat=chat)
    check_context(config, context, f"{field}={str(folder)!r}")
    decoder = load_decoder(
        folder, dtype=dtype, param_dtype=param_dtype, mesh=mesh, attention=attention, remat=remat
    )
    return decoder, tokenizer


def check_context(config: DecoderConfig, context: int, where: str) -> None:
    """Raises UserError for texts longer than the positions that a model was made for."""
    if context > config.max_positions:
        raise UserError(
            f"{where}: a context of {context} tokens is more than the model's max_position_embeddings="
            f"{config.max_positions}; give its rollout a shorter context "
            "(--config.rollout.context=N, or that of its own section)"
        )


def save_decoder(
    folder: str | Path,
    decoder: Decoder,
    tokenizer: Any = None,
    *,
    dtype: DTypeLike = jnp.float32,
    shard_size: int = SHARD_SIZE,
) -> None:
    """Writes a folder that transformers and vLLM load, with the tokenizer's files if it is given; adapters are merged.

    A `ValueModel` becomes a ...ForSequenceClassification with one label.

    Args:
        folder: an older export in it is replaced.
        decoder: where it is sharded over several processes, each calls this and the first writes.
        tokenizer: of transformers.
        dtype: of the weights: float32, bfloat16 or float16.
        shard_size: most bytes of weights in one file.

    Raises:
        UserError: another dtype, or float16 and a value too large for it; the folder is as it was.
    """
    decoder = merge_lora(decoder)
    hf = decoder.config.to_hf() | {"dtype": jnp.dtype(dtype).name}
    if isinstance(decoder, ValueModel):
        name = hf["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
        hf |= {"architectures": [name], "id2label": {"0": "value"}, "label2id": {"value": 0}}
    _write(folder, hf, decoder, _DECODER, dtype, shard_size)
    if jax.process_index() == 0:
        _write_beside(folder, hf, tokenizer)


def save_config_and_tokenizer(folder: str | Path, config: DecoderConfig, tokenizer: Any) -> None:
    """Writes what `save_decoder` writes, but for the weights."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    hf = config.to_hf() | {"dtype": "float32"}
    write_json(Path(folder) / CONFIG_FILE, hf)
    _write_beside(folder, hf, tokenizer)


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
    config = read_encoder_config(folder, pooling)
    prefix = ENCODER_FAMILIES[config.model_type].prefix
    abstract = nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype))
    return load(folder, abstract, _ENCODER, _ENCODER_IGNORED, mesh, prefix)


def save_encoder(
    folder: str | Path, encoder: Encoder, tokenizer: Any = None, *, dtype: DTypeLike = jnp.float32
) -> None:
    """Writes a folder that transformers' AutoModel loads (without a pooler), with the tokenizer's files if given."""
    _write(folder, encoder.config.to_hf() | {"dtype": jnp.dtype(dtype).name}, encoder, _ENCODER, dtype)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _write(
    folder: str | Path,
    hf: Mapping[str, Any],
    model: nnx.Module,
    table: Sequence[Entry],
    dtype: DTypeLike,
    shard_size: int = SHARD_SIZE,
) -> None:
    """config.json and the weights, by the first process; the others take part in gathering the parameters."""
    tensors = export(model, table, dtype)
    if jax.process_index() == 0:
        write_folder(folder, hf, shapes(model, table), jnp.dtype(dtype), tensors, shard_size)
    else:
        collections.deque(tensors, maxlen=0)


def _write_beside(folder: str | Path, hf: Mapping[str, Any], tokenizer: Any) -> None:
    """The files beside config.json and the weights. Sampling is left to the defaults: a policy is one at temperature 1."""
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    write_json(Path(folder) / GENERATION, {name: hf[name] for name in ids if hf[name] is not None})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
