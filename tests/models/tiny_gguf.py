"""Tiny GGUF files, written with the gguf package from Hugging Face tensors, and their expected contents."""

import json

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from rrl.models.gguf_tokenizer import QWEN2_WORDS

gguf = pytest.importorskip("gguf", reason="gguf is not installed; importing needs the extra [gguf]")

KINDS = gguf.GGMLQuantizationType
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 2, 64, 4, 2, 32, 96
"""Widths are multiples of 32, the size of a block; heads are wider than hidden / heads."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TEXTS = [f"The film of {year} was made by Ann's sister, who didn't know it. " for year in range(1900, 1960)]


def byte_level_vocabulary():
    """Tokens and merges of a small BPE that splits text as Qwen2 does."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
        ),
    )
    vocab = made.get_vocab()
    alphabet_of = set(alphabet)
    # Merges, best first: the trainer numbers tokens in the order of the merges.
    merges = [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    assert all(set(merge) <= alphabet_of | {" "} for merge in merges)
    return sorted(vocab, key=vocab.get), merges


def sentence_piece_vocabulary():
    """Tokens, scores and types of a small SentencePiece BPE with byte fallback."""
    tokens = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<tag>", 0.0, 4), ("  ", 0.0, 4)]
    tokens += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces = ["▁a", "ab", "▁ab", "abc", "bc", "▁", "a", "b", "c"]
    return tokens + [(piece, -float(rank), 1) for rank, piece in enumerate(pieces)]


def hf_tensors(architecture, vocab, tied=True, head_dim=HEAD_DIM):
    """Random Hugging Face tensors of a tiny model, by name."""
    draw = np.random.default_rng(0)
    q, k = HEADS * head_dim, KV_HEADS * head_dim
    shapes = {"model.embed_tokens.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, HIDDEN)
    for layer in range(LAYERS):
        block = {
            "input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (q, HIDDEN), "self_attn.k_proj.weight": (k, HIDDEN),
            "self_attn.v_proj.weight": (k, HIDDEN), "self_attn.o_proj.weight": (HIDDEN, q),
            "mlp.gate_proj.weight": (MLP, HIDDEN), "mlp.up_proj.weight": (MLP, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, MLP),
        }  # fmt: skip
        if architecture == "qwen2":
            block |= {
                "self_attn.q_proj.bias": (q,),
                "self_attn.k_proj.bias": (k,),
                "self_attn.v_proj.bias": (k,),
            }
        if architecture in ("qwen3", "gemma3"):
            block |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
        if architecture == "gemma3":
            block |= {
                "pre_feedforward_layernorm.weight": (HIDDEN,),
                "post_feedforward_layernorm.weight": (HIDDEN,),
            }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def to_gguf(architecture, name, tensor):
    """A tensor as llama.cpp's convert_hf_to_gguf.py changes it, with the name that the gguf package gives it."""
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), LAYERS)
    stem, suffix = name.rsplit(".", 1)
    if architecture == "gemma3" and "norm" in name:
        tensor = tensor + np.float32(1)
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = HEADS if "q_proj" in name else KV_HEADS
        tensor = tensor.reshape(heads, 2, len(tensor) // heads // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
    return f"{names.get_name(stem)}.{suffix}", tensor


def write_gguf(
    path,
    architecture="qwen2",
    kind=KINDS.F32,
    *,
    tied=True,
    head_dim=HEAD_DIM,
    model="",
    change=None,
    leave_out=(),
    extra=None,
):
    """Writes a tiny model and returns its tensors as they must be imported, in float32.

    Args:
        architecture: llama.cpp's name.
        kind: quantization of the matrices; vectors are float32.
        model: tokenizer.ggml.model; "": that of the architecture.
        change: metadata that replace or extend the usual ones, as value or (value, type); None removes a key.
        leave_out: GGUF names of tensors that are not written.
        extra: further tensors, by GGUF name.
    """
    model = model or ("llama" if architecture == "gemma3" else "gpt2")
    metadata = {
        "block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": MLP,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": head_dim,
        "attention.value_length": head_dim, "rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    metadata = {f"{architecture}.{key}": value for key, value in metadata.items()}
    if architecture == "gemma3":
        metadata["gemma3.attention.sliding_window"] = 16
    tokenizer, vocab = _tokenizer_metadata(model)
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    metadata |= {"tokenizer.chat_template": TEMPLATE} | (change or {})
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if value is not None:
            _add(writer, key, value)
    expected = {}
    for name, tensor in hf_tensors(architecture, vocab, tied, head_dim).items():
        gguf_name, stored = to_gguf(architecture, name, tensor)
        used = kind if tensor.ndim == 2 else KINDS.F32
        data = gguf.quantize(stored, used)
        if gguf_name not in leave_out:
            writer.add_tensor(gguf_name, data, raw_dtype=used)
        expected[name] = gguf.dequantize(gguf.quantize(tensor, used), used) if tensor.ndim == 2 else tensor
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _tokenizer_metadata(model):
    """Metadata of a tokenizer, without their prefix, and the number of its tokens."""
    if model == "llama":
        tokens, scores, types = zip(*sentence_piece_vocabulary(), strict=True)
        special = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
        return {"model": model, "tokens": tokens, "scores": scores, "token_type": types, **special}, len(
            tokens
        )
    tokens, merges = byte_level_vocabulary()
    types = [3 if token in SPECIAL else 1 for token in tokens]
    special = {"eos_token_id": 2, "padding_token_id": 0, "bos_token_id": 0, "add_bos_token": False}
    return {
        "model": model, "pre": "qwen2", "tokens": tokens, "token_type": types, "merges": merges, **special
    }, len(tokens)  # fmt: skip


def _add(writer, key, value):
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    adders.get(type(value), writer.add_array)(key, value)
