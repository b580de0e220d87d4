"""Loading and saving of Hugging Face model folders, with the tables that map tensor names to parameters.

Read `load_decoder` first.
"""

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
from rrl.models.transfer import TensorMap, export_tensors, load_module, tensor_shapes
from rrl.models.weights import (
    CONFIG_FILE,
    GENERATION_FILE,
    SHARD_SIZE,
    SafetensorsFolder,
    folder_hash,
    read_config,
    read_generation_config,
    write_folder,
    write_json,
)

COMPARED_ROWS = 4096
"""Number of rows of two tensors that are read and compared at a time."""

DecoderT = TypeVar("DecoderT", bound=Decoder)

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
    TensorMap("embedding", "model.embed_tokens.weight"),
    TensorMap("norm", "model.norm.weight"),
    TensorMap("head", "lm_head.weight", inputs=1),
    TensorMap("score", "score.weight", inputs=1),
    TensorMap("layers.attention_norm", "model.layers.{}.input_layernorm.weight"),
    TensorMap("layers.q", "model.layers.{}.self_attn.q_proj.weight", inputs=1),
    TensorMap("layers.k", "model.layers.{}.self_attn.k_proj.weight", inputs=1),
    TensorMap("layers.v", "model.layers.{}.self_attn.v_proj.weight", inputs=1),
    TensorMap("layers.q_bias", "model.layers.{}.self_attn.q_proj.bias", inputs=0),
    TensorMap("layers.k_bias", "model.layers.{}.self_attn.k_proj.bias", inputs=0),
    TensorMap("layers.v_bias", "model.layers.{}.self_attn.v_proj.bias", inputs=0),
    TensorMap("layers.q_norm", "model.layers.{}.self_attn.q_norm.weight"),
    TensorMap("layers.k_norm", "model.layers.{}.self_attn.k_norm.weight"),
    TensorMap("layers.o", "model.layers.{}.self_attn.o_proj.weight", inputs=2),
    TensorMap("layers.mlp_norm", "model.layers.{}.post_attention_layernorm.weight"),
    TensorMap("layers.gate", "model.layers.{}.mlp.gate_proj.weight", inputs=1),
    TensorMap("layers.up", "model.layers.{}.mlp.up_proj.weight", inputs=1),
    TensorMap("layers.down", "model.layers.{}.mlp.down_proj.weight", inputs=1),
)
# Families with norms after attention and MLP use the name post_attention_layernorm for the norm after attention. In other
# families it is the norm before the MLP.
_NORMS_WITH_POST_NORMS = (
    TensorMap("layers.mlp_norm", "model.layers.{}.pre_feedforward_layernorm.weight"),
    TensorMap("layers.post_attention_norm", "model.layers.{}.post_attention_layernorm.weight"),
    TensorMap("layers.post_mlp_norm", "model.layers.{}.post_feedforward_layernorm.weight"),
)
# Names of tensors that are not read. A headless decoder has no `head` parameter: embeddings are tied, or it is a ValueModel.
_DECODER_IGNORED = r".*rotary_emb\.inv_freq"
_HEADLESS_DECODER_IGNORED = r".*rotary_emb\.inv_freq|lm_head\.weight"
_IMAGE_PARTS = r"(model\.)?(vision_tower|multi_modal_projector)\..*"

_ENCODER = (
    TensorMap("embedding", "embeddings.word_embeddings.weight"),
    TensorMap("position_embedding", "embeddings.position_embeddings.weight"),
    TensorMap("type_embedding", "embeddings.token_type_embeddings.weight"),
    TensorMap("norm", "embeddings.LayerNorm.weight"),
    TensorMap("norm_bias", "embeddings.LayerNorm.bias"),
    TensorMap("layers.q", "encoder.layer.{}.attention.self.query.weight", inputs=1),
    TensorMap("layers.k", "encoder.layer.{}.attention.self.key.weight", inputs=1),
    TensorMap("layers.v", "encoder.layer.{}.attention.self.value.weight", inputs=1),
    TensorMap("layers.q_bias", "encoder.layer.{}.attention.self.query.bias", inputs=0),
    TensorMap("layers.k_bias", "encoder.layer.{}.attention.self.key.bias", inputs=0),
    TensorMap("layers.v_bias", "encoder.layer.{}.attention.self.value.bias", inputs=0),
    TensorMap("layers.o", "encoder.layer.{}.attention.output.dense.weight", inputs=2),
    TensorMap("layers.o_bias", "encoder.layer.{}.attention.output.dense.bias"),
    TensorMap("layers.attention_norm", "encoder.layer.{}.attention.output.LayerNorm.weight"),
    TensorMap("layers.attention_norm_bias", "encoder.layer.{}.attention.output.LayerNorm.bias"),
    TensorMap("layers.up", "encoder.layer.{}.intermediate.dense.weight", inputs=1),
    TensorMap("layers.up_bias", "encoder.layer.{}.intermediate.dense.bias"),
    TensorMap("layers.down", "encoder.layer.{}.output.dense.weight", inputs=1),
    TensorMap("layers.down_bias", "encoder.layer.{}.output.dense.bias"),
    TensorMap("layers.mlp_norm", "encoder.layer.{}.output.LayerNorm.weight"),
    TensorMap("layers.mlp_norm_bias", "encoder.layer.{}.output.LayerNorm.bias"),
)
# The pooler and the pretraining heads are not part of a text encoder; old files contain a buffer of positions.
_ENCODER_IGNORED = re.compile(r"pooler\..*|cls\..*|lm_head\..*|embeddings\.position_ids")


def read_decoder_config(folder: str | Path) -> DecoderConfig:
    """Reads a decoder's shape, with the end tokens of both config.json and generation_config.json.

    Raises:
        UserError: as `DecoderConfig.from_hf`, with the folder's name.
    """
    with _name_folder_in_errors(folder):
        return DecoderConfig.from_hf(read_config(folder), read_generation_config(folder))


def read_encoder_config(folder: str | Path, pooling: Pooling | None = None) -> EncoderConfig:
    """Reads an encoder's shape. Raises UserError as `EncoderConfig.from_hf`, with the folder's name."""
    with _name_folder_in_errors(folder):
        return EncoderConfig.from_hf(read_config(folder), pooling or Pooling())


@contextlib.contextmanager
def _name_folder_in_errors(folder: str | Path) -> Iterator[None]:
    """Adds the folder's name to a UserError raised within the block, if it is missing."""
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
    """Loads a Hugging Face folder of a Qwen2, Qwen3, Llama or Gemma 3 model, of the latter the text part.

    Args:
        folder: contains config.json and safetensors weights, in one file or several.
        dtype: of the computation.
        param_dtype: of the parameters; they are converted to it.
        mesh: parameters are sharded over it by `rrl.parallel.rules`; None: all are on the default device.
        attention, remat: see `Decoder`.

    Raises:
        UserError: config.json has an unsupported field, or a tensor is missing, unexpected, or has the wrong shape or dtype.
    """
    return _load(Decoder, folder, dtype, param_dtype, mesh, attention, remat)


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
    """Loads a ...ForSequenceClassification folder with one label, or a language model, which gets a new value head of zeros.

    Args:
        layers: number of first layers to use; 0: all. The other arguments are those of `load_decoder`.

    Raises:
        UserError: as `load_decoder`, or the head has more than one label.
    """
    weights = SafetensorsFolder(folder)
    shape = weights.shape("score.weight") if "score.weight" in weights.names() else (1,)
    if shape[0] != 1:
        raise UserError(
            f"{weights.file('score.weight')}: tensor score.weight {shape} has {shape[0]} labels, but a value model has one; "
            "give a ...ForSequenceClassification with num_labels=1, or a language model, which gets a new value head"
        )
    return _load(ValueModel, folder, dtype, param_dtype, mesh, attention, remat, layers)


def _load(
    kind: type[DecoderT],
    folder: str | Path,
    dtype: DTypeLike,
    param_dtype: DTypeLike,
    mesh: Mesh | None,
    attention: AttentionBackend,
    remat: Remat,
    layers: int = 0,
) -> DecoderT:
    """Loads a decoder or a subclass, with the first `layers` layers (0: all)."""
    whole = read_decoder_config(folder)
    if not 0 <= layers <= whole.layers:
        raise UserError(
            f"{folder} has {whole.layers} layers; layers={layers} must be 0 (all of them) to {whole.layers}"
        )
    config = whole.first_layers(layers or whole.layers)
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
    ignored = [_DECODER_IGNORED if hasattr(abstract, "head") else _HEADLESS_DECODER_IGNORED, _IMAGE_PARTS]
    ignored += [rf"model\.layers\.{layer}\..*" for layer in range(config.layers, whole.layers)]
    table, pattern = _decoder_table(config), re.compile("|".join(ignored))
    return load_module(folder, abstract, table, pattern, mesh, _text_name, optional=["score.weight"])


def _decoder_table(config: DecoderConfig) -> Sequence[TensorMap]:
    """The tensors of a decoder of this family."""
    if not config.family.post_norms:
        return _DECODER
    renamed = {entry.path for entry in _NORMS_WITH_POST_NORMS}
    return (*(entry for entry in _DECODER if entry.path not in renamed), *_NORMS_WITH_POST_NORMS)


def _text_name(name: str) -> str:
    """Name of a tensor in a text model, from its name in a model with images.

    Gemma 3's names have one of two prefixes: language_model.model. in the published folders, model.language_model. in
    transformers 5.
    """
    name = re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", name)
    return name.removeprefix("language_model.")


def _head_differs(folder: str | Path) -> bool:
    """Whether a folder has an output head that differs from the embedding; logs a warning if so.

    If they differ, both are loaded, even with tie_word_embeddings=true, as in transformers 5.
    """
    weights = SafetensorsFolder(folder)
    stored = {_text_name(name): name for name in weights.names()}
    embedding, head = (stored.get(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    if embedding is None or head is None:
        return False
    rows = weights.shape(embedding)[0]
    if weights.shape(head) == weights.shape(embedding) and all(
        np.array_equal(weights.read(embedding, part), weights.read(head, part))
        for at in range(0, rows, COMPARED_ROWS)
        for part in [(slice(at, at + COMPARED_ROWS),)]
    ):
        return False
    logging.getLogger(__name__).warning(
        "%s: config.json has tie_word_embeddings=true, but the weights contain a %s that differs from %s. Both are used, as in "
        "transformers 5. Set tie_word_embeddings to false in config.json.",
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
    """Loads a decoder and its tokenizer from one folder.

    Args:
        folder: of the model.
        field: name of the config field that holds the folder, for error messages (policy, reader, ...).
        chat: whether the tokenizer must have a chat template.
        context: maximum number of tokens of a text; the model must support it.
        dtype, param_dtype, mesh, attention, remat: see `load_decoder`.

    Raises:
        UserError: as `load_decoder`; the tokenizer does not fit the model or lacks a chat template; or the model does not
            support `context`.
    """
    tokenizer, config = load_tokenizer(folder), read_decoder_config(folder)
    check_tokenizer(tokenizer, config, field, chat=chat)
    check_context(config, context, f"{field}={str(folder)!r}")
    decoder = load_decoder(
        folder, dtype=dtype, param_dtype=param_dtype, mesh=mesh, attention=attention, remat=remat
    )
    return decoder, tokenizer


def check_context(config: DecoderConfig, context: int, where: str) -> None:
    """Raises UserError if texts of `context` tokens exceed the model's number of positions."""
    if context > config.max_context:
        extended = " (with RoPE scaling)" if config.max_context > config.max_positions else ""
        raise UserError(
            f"{where}: a context of {context} tokens is more than the model's max_position_embeddings="
            f"{config.max_context}{extended}; give a smaller context "
            "(--config.rollout.context=N for the policy, --config.reader_rollout.context=N for the reader, "
            "--config.judge_rollout.context=N for the judge)"
        )


def save_decoder(
    folder: str | Path,
    decoder: Decoder,
    tokenizer: Any = None,
    *,
    dtype: DTypeLike = jnp.float32,
    shard_size: int = SHARD_SIZE,
) -> None:
    """Writes a folder that transformers and vLLM load, with the tokenizer's files if given. Adapters are merged.

    A `ValueModel` is written as a ...ForSequenceClassification with one label.

    Args:
        folder: to write; replaces an older export in it.
        decoder: the model. If it is sharded over several processes, all must call this function; the first one writes.
        tokenizer: of transformers; None: no tokenizer files.
        dtype: of the written weights: float32, bfloat16 or float16.
        shard_size: maximum size of the weights in one file, in bytes.

    Raises:
        UserError: the dtype is not supported, or a value is too large for float16. The folder is then unchanged.
    """
    decoder = merge_lora(decoder)
    hf = decoder.config.to_hf() | {"dtype": jnp.dtype(dtype).name}
    if isinstance(decoder, ValueModel):
        name = decoder.config.family.classifier
        hf |= {"architectures": [name], "id2label": {"0": "value"}, "label2id": {"value": 0}}
    _write(folder, hf, decoder, _decoder_table(decoder.config), dtype, shard_size)
    if jax.process_index() == 0:
        _write_other_files(folder, hf, tokenizer)


def save_config_and_tokenizer(folder: str | Path, config: DecoderConfig, tokenizer: Any) -> None:
    """Writes the same files as `save_decoder`, except the weights."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    hf = config.to_hf() | {"dtype": "float32"}
    write_json(Path(folder) / CONFIG_FILE, hf)
    _write_other_files(folder, hf, tokenizer)


def load_encoder(
    folder: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    pooling: Pooling | None = None,
) -> Encoder:
    """Loads a Hugging Face folder of a BERT, RoBERTa or XLM-RoBERTa (E5, BGE, MiniLM, ...).

    Args:
        pooling: how embeddings are computed; config.json does not contain it. None: `Pooling()`, the mean scaled to norm 1.
            `rrl.retrieval.encoder_folder.load_text_encoder` reads it from the folder. The other arguments and the errors are
            those of `load_decoder`.
    """
    config = read_encoder_config(folder, pooling)
    prefix = ENCODER_FAMILIES[config.model_type].prefix
    abstract = nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype))
    return load_module(
        folder, abstract, _ENCODER, _ENCODER_IGNORED, mesh, lambda name: name.removeprefix(prefix)
    )


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
    table: Sequence[TensorMap],
    dtype: DTypeLike,
    shard_size: int = SHARD_SIZE,
) -> None:
    """Writes config.json and the weights in the first process; the others help to gather the parameters."""
    tensors = export_tensors(model, table, dtype)
    if jax.process_index() == 0:
        write_folder(folder, hf, tensor_shapes(model, table), jnp.dtype(dtype), tensors, shard_size)
    else:
        collections.deque(tensors, maxlen=0)


def _write_other_files(folder: str | Path, hf: Mapping[str, Any], tokenizer: Any) -> None:
    """Writes generation_config.json and the tokenizer. Sampling settings are left out: the policy samples at temperature 1."""
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    write_json(Path(folder) / GENERATION_FILE, {name: hf[name] for name in ids if hf[name] is not None})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
