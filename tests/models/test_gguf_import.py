"""Importing GGUF files: tensors, config, tokenizer and template equal what was written; wrong files are named."""

import errno
import json
import math
import tracemalloc

import numpy as np
import pytest
from transformers import Qwen2Tokenizer

from rrl.errors import UserError
from rrl.files import SaveError
from rrl.models import gguf_import
from rrl.models.config import DecoderConfig
from rrl.models.gguf_import import import_gguf
from rrl.models.hf import load_language_model, read_decoder_config
from rrl.models.tensor_files import FLOATS
from rrl.models.tokenizer import load_tokenizer
from rrl.models.weights import SafetensorsFolder
from tests.memory import limit_memory
from tests.models.tiny_gguf import (
    HEAD_DIM,
    KINDS,
    SPECIAL,
    TEMPLATE,
    TEXTS,
    byte_level_vocabulary,
    write_gguf,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
LLAMA3 = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": None}


def imported(tmp_path, *args, dtype="float32", **kwargs):
    """Writes and imports a tiny model; returns its folder and the expected tensors."""
    expected = write_gguf(tmp_path / "tiny.gguf", *args, **kwargs)
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "out", dtype=dtype)
    return tmp_path / "out", expected


def refusal(tmp_path, **kwargs):
    """The message of the error for a tiny model; nothing may be left."""
    with pytest.raises(UserError) as error:
        imported(tmp_path, **kwargs)
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]
    assert str(tmp_path / "tiny.gguf") in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", [KINDS.F32, KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0, KINDS.Q5_1])
def test_tensors_equal_the_dequantized_ones(tmp_path, architecture, kind):
    folder, expected = imported(tmp_path, architecture, kind, tied=architecture != "qwen3")
    stored = SafetensorsFolder(folder)
    assert set(stored.names()) == set(expected)
    for name, tensor in expected.items():
        # 1 + w is rounded to float32 in the file.
        atol = 3e-7 if architecture == "gemma3" and "norm" in name else 0
        np.testing.assert_allclose(stored.read(name), tensor, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_are_rounded_to_the_dtype_after_dequantization(tmp_path, dtype):
    folder, expected = imported(tmp_path, "llama", KINDS.Q8_0, dtype=dtype)
    stored = SafetensorsFolder(folder)
    kind = FLOATS[{"bfloat16": "BF16", "float16": "F16"}[dtype]]
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    for name, tensor in expected.items():
        np.testing.assert_array_equal(stored.read(name), tensor.astype(kind), err_msg=name)


def test_large_models_are_sharded(tmp_path):
    expected = write_gguf(tmp_path / "tiny.gguf")
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "out", dtype="float32", shard_size=100_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    assert set(SafetensorsFolder(tmp_path / "out").names()) == set(expected)


def test_memory_holds_one_tensor_at_a_time(tmp_path):
    large = np.zeros((100_000, 64), np.float32)
    names = ("token_embd.weight", "output.weight")
    write_gguf(tmp_path / "tiny.gguf", leave_out=names, extra=dict.fromkeys(names, large))
    del large
    tracemalloc.start()
    try:
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "out", dtype="float32")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Beside the tensor of 25.6 MB: 2^20 values as bytes, as float32, and whether each is finite.
    assert 25.6e6 < peak < 25.6e6 + 12e6


def test_a_tensor_larger_than_memory_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    limit_memory(monkeypatch, tmp_path, 100)
    with pytest.raises(
        UserError, match=r"tiny.gguf needs .* are available: largest tensor .*--dtype=bfloat16"
    ):
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "out", dtype="float32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_folder_has_the_config_that_the_metadata_describe(tmp_path, architecture):
    folder, expected = imported(tmp_path, architecture, tied=False)
    assert read_decoder_config(folder) == DecoderConfig(
        vocab_size=len(expected["lm_head.weight"]), hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, mlp=96,
        model_type=architecture, rope_theta=1e6, rms_eps=1e-6, tie_embeddings=False, max_positions=128,
        bos_token_id=0, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    load_language_model(folder, "policy")


def test_gemma_3_gets_its_layer_types_and_rope_bases(tmp_path):
    folder, _ = imported(tmp_path, "gemma3", change={"gemma3.attention.sliding_window_pattern": 2})
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "gemma3_text"
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (16, HEAD_DIM)


@pytest.mark.parametrize(
    "change", [{"gemma3.attention.sliding_window": 0}, {"gemma3.attention.sliding_window": None}]
)
def test_a_gemma_3_without_windows_attends_to_all_tokens(tmp_path, change):
    folder, _ = imported(tmp_path, "gemma3", change=change)
    assert set(json.loads((folder / "config.json").read_text())["layer_types"]) == {"full_attention"}
    assert not any(read_decoder_config(folder).sliding_layers)


def test_tokens_that_end_a_turn_are_in_the_generation_config(tmp_path):
    folder, _ = imported(tmp_path, change={"tokenizer.ggml.eot_token_id": 1})
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 1]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.factor": 1.0}, None),
        ({"llama.rope.scale_linear": 0.0}, None),
    ],
)
def test_linear_scaling_is_read_as_llama_cpp_reads_it(tmp_path, change, expected):
    folder, _ = imported(tmp_path, "llama", change=change)
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == expected


def test_yarn_scaling_is_read(tmp_path):
    scaling = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 64,
    }
    folder, _ = imported(tmp_path, change=scaling)
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }


def llama3_divisors(factor, original=8192):
    """Llama 3.1's divisors of the RoPE frequencies, frequency by frequency as Meta's code has them."""
    divisors = []
    for index in range(HEAD_DIM // 2):
        wavelength = 2 * math.pi * 1e6 ** (2 * index / HEAD_DIM)
        smooth = (original / wavelength - 1) / (4 - 1)
        if wavelength < original / 4:
            divisors.append(1.0)
        elif wavelength > original:
            divisors.append(factor)
        else:
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_llama_3_scaling_is_recovered_from_its_divisors(tmp_path):
    folder, _ = imported(tmp_path, "llama", extra={"rope_freqs.weight": llama3_divisors(32.0)})
    scaling = read_decoder_config(folder).rope_scaling
    assert (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor) == (32.0, 1.0, 4.0)
    assert scaling.original_max_position_embeddings == 8192


def test_other_divisors_are_refused(tmp_path):
    message = refusal(tmp_path, architecture="llama", extra={"rope_freqs.weight": llama3_divisors(8.0, 4096)})
    assert "rope_freqs.weight" in message


def test_a_qwen_tokenizer_equals_transformers_own(tmp_path):
    folder, _ = imported(tmp_path)
    tokens, merges = byte_level_vocabulary()
    vocab = {token: index for index, token in enumerate(tokens)}
    own = Qwen2Tokenizer(vocab=vocab, merges=[tuple(merge.split()) for merge in merges], eos_token=SPECIAL[2])
    own.add_special_tokens({"additional_special_tokens": [SPECIAL[1]]})
    ours = load_tokenizer(folder)
    for text in [*TEXTS[:3], "cafe\u0301 1931\n\n  x", "日本 🙂", f"{SPECIAL[1]}user\nhi{SPECIAL[2]}\n", ""]:
        assert ours.encode(text) == own.encode(text), text
    assert (ours.eos_token, ours.pad_token) == (SPECIAL[2], SPECIAL[0])
    assert ours.get_vocab() == vocab
    assert ours.chat_template == TEMPLATE


def test_a_llama_3_tokenizer_adds_bos_and_does_not_split_whole_tokens(tmp_path):
    tokens, _ = byte_level_vocabulary()
    tokens, types = [*tokens, "xyz", "190"], [*[1] * len(tokens), 1, 1]
    change = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, **LLAMA3}
    padding = {"token_embd.weight": np.zeros((len(tokens), 64), np.float32)}
    folder, _ = imported(tmp_path, "llama", change=change, leave_out=padding, extra=padding)
    ours = load_tokenizer(folder)
    # No merge makes "xyz" or "190". Digits are split into groups of three from the left.
    assert ours.convert_ids_to_tokens(ours.encode("xyz1901")) == [SPECIAL[0], "xyz", "190", "1"]
    assert ours.encode("xyz", add_special_tokens=False) == [len(tokens) - 2]


def test_smollm_splits_digits(tmp_path):
    folder, _ = imported(tmp_path, "llama", change={"tokenizer.ggml.pre": "smollm"})
    ours = load_tokenizer(folder)
    assert ours.convert_ids_to_tokens(ours.encode("1901")) == list("1901")


@pytest.mark.parametrize(("prefix", "expected"), [
    (True, ["<s>", "▁ab", "c", "▁▁", "a", "<0xC3>", "<0xA9>", "<tag>", "b"]),
    (False, ["<s>", "abc", "▁▁", "a", "<0xC3>", "<0xA9>", "<tag>", "b"]),
])  # fmt: skip
def test_sentence_piece_merges_by_score(tmp_path, prefix, expected):
    """By hand: "▁a" has the best score, then "ab", "▁ab", "abc"; é has no token; a run of spaces is one token."""
    change = {"tokenizer.ggml.add_space_prefix": prefix}
    folder, _ = imported(tmp_path, "llama", model="llama", change=change)
    ours = load_tokenizer(folder)
    ids = ours.encode("abc  aé<tag>b")
    assert ours.convert_ids_to_tokens(ids) == expected
    assert ours.decode(ids, skip_special_tokens=True) == "abc  aé<tag>b"
    assert ours.bos_token == "<s>"


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"leave_out": ["blk.1.ffn_up.weight"]}, "lacks the tensors blk.1.ffn_up.weight"),
        ({"leave_out": ["token_embd.weight"]}, "lacks the tensor token_embd.weight"),
        ({"extra": {"blk.0.ffn_gate_inp.weight": np.zeros((4, 4), np.float32)}}, "blk.0.ffn_gate_inp.weight"),
        ({"change": {"qwen2.embedding_length": 96}}, "tensor token_embd.weight has shape"),
        ({"change": {"qwen2.block_count": None}}, "the metadata lack qwen2.block_count"),
        ({"change": {"qwen2.attention.head_count": [4, 4]}}, "must be a whole number"),
        ({"change": {"general.architecture": "mamba"}}, "'mamba' is not supported; choose a model of one of llama"),
        ({"change": {"split.count": 3}}, "one of 3 parts"),
        ({"change": {"qwen2.expert_count": 8}}, "mixture of 8 experts"),
        ({"change": {"qwen2.rope.scaling.type": "longrope"}}, "RoPE scaling 'longrope'"),
        ({"architecture": "gemma3", "change": {"gemma3.final_logit_softcapping": 30.0}}, "final_logit_softcapping=30.0"),
        ({"change": {"qwen2.rope.dimension_count": 16}}, "qwen2.rope.dimension_count=16"),
        ({"change": {"tokenizer.ggml.model": "rwkv"}}, "tokenizer.ggml.model='rwkv'"),
        ({"change": {"tokenizer.ggml.pre": "tekken"}}, "tokenizer.ggml.pre='tekken'"),
        ({"change": {"tokenizer.ggml.pre": None}}, "the metadata lack tokenizer.ggml.pre"),
        ({"change": {"tokenizer.ggml.merges": None}}, "the metadata lack tokenizer.ggml.merges"),
        ({"change": {"tokenizer.ggml.merges": ["a b c"]}}, "'a b c' in tokenizer.ggml.merges"),
        ({"change": {"tokenizer.ggml.merges": ["a zzz"]}}, "data contradict each other"),
        ({"change": {"tokenizer.ggml.tokens": None}}, "the metadata lack tokenizer.ggml.tokens"),
        ({"change": {"tokenizer.ggml.token_type": [1, 1]}}, "a number for each of the 299 tokens"),
        ({"change": {"tokenizer.ggml.eos_token_id": 9999}}, "tokenizer.ggml.eos_token_id=9999"),
    ],
)  # fmt: skip
def test_an_unsupported_file_is_named_and_nothing_is_written(tmp_path, kwargs, named):
    assert named in refusal(tmp_path, **kwargs)


def test_values_too_large_for_float16_are_refused(tmp_path):
    large = np.full(64, 1e6, np.float32)
    write_gguf(tmp_path / "tiny.gguf", leave_out=["output_norm.weight"], extra={"output_norm.weight": large})
    with pytest.raises(UserError, match=r"output_norm.weight .* not finite in float16; choose bfloat16"):
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "out", dtype="float16")
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]


def test_an_existing_folder_is_not_touched(tmp_path):
    folder, _ = imported(tmp_path)
    before = sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir())
    with pytest.raises(UserError, match="out is not an empty folder"):
        import_gguf(tmp_path / "tiny.gguf", folder)
    assert sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir()) == before


def test_an_empty_folder_gets_the_files_also_through_a_link_and_as_the_current_folder(tmp_path, monkeypatch):
    whole, _ = imported(tmp_path)
    names = sorted(file.name for file in whole.iterdir())
    for name in ("empty", "linked", "current"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    monkeypatch.chdir(tmp_path / "current")
    for out in (tmp_path / "empty", tmp_path / "link", "."):
        import_gguf(tmp_path / "tiny.gguf", out)
    for name in ("empty", "linked", "current"):
        assert sorted(file.name for file in (tmp_path / name).iterdir()) == names


def test_a_failed_import_leaves_an_empty_folder_empty(tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "out").mkdir()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_import, "write_json", full)
    with pytest.raises(SaveError):
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_import, "write_json", full)
    with pytest.raises(SaveError, match="out could not be saved: the disk"):
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]


def test_too_little_space_is_refused_before_writing(tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf_import.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(UserError, match=r"need 0\.00 GB, but the disk has"):
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]
