"""An imported GGUF file equals what transformers (torch) reads from the same file, tensor by tensor and token by token.

`GGUF_FILES=a.gguf:b.gguf pytest -n 0 -m slow tests/models/test_gguf_parity.py` compares files of real models.
"""

import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from rrl.models.gguf_import import import_gguf
from rrl.models.tokenizer import load_tokenizer
from rrl.models.weights import SafetensorsFolder
from tests.models.tiny_gguf import KINDS, TEXTS, sentence_piece_vocabulary, write_gguf

torch = pytest.importorskip("torch", reason="torch is not installed; parity needs the extra [parity]")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity
REAL = [name for name in os.environ.get("GGUF_FILES", "").split(":") if name]
MORE_TEXTS = [
    *TEXTS[:2], "", "  a  b\n\n\n\tc", "1234567 89", "日本語 🙂 naïve", "<unused5><0x0A>", "a▁b",
    "<|im_start|>user\nhi<|im_end|>\n", "aabcbcabc  abc", "<tag>ab</s>",
]  # fmt: skip
HEAD_DIMS = {"qwen2": 16, "qwen3": 128, "gemma3": 32, "llama": 16}
"""For Gemma 3, transformers reads the head dimension. For Qwen3 it takes 128, for others hidden / heads."""

GEMMA_TOKENS = ("<bos>", "<eos>", "<pad>", "<mask>")
"""transformers adds them to every Gemma tokenizer that lacks them."""


def compare_tensors(file, folder):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).state_dict()
    stored = SafetensorsFolder(folder)
    names = set(stored.names())
    assert theirs.keys() - names <= {"lm_head.weight"}  # tied
    assert names <= theirs.keys()
    for name in names:
        np.testing.assert_array_equal(stored.read(name), theirs[name].numpy(), err_msg=name)


def compare_tokens(file, folder, texts):
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours, auto = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    vocab = theirs.get_vocab()
    assert vocab == ours.get_vocab() | {name: vocab[name] for name in GEMMA_TOKENS if name in vocab}
    assert ours.chat_template == theirs.chat_template
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for text in texts:
        # transformers drops Qwen's NFC when it reads GGUF.
        text = unicodedata.normalize("NFC", text)
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, text
            assert auto.encode(text, add_special_tokens=special) == ids, text
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("architecture", HEAD_DIMS)
def test_a_tiny_file_equals_what_transformers_reads(tmp_path, architecture):
    file = tmp_path / "tiny.gguf"
    model = "llama" if architecture == "llama" else ""
    change = {}
    if architecture == "llama":
        # transformers writes a token of several spaces as ▁ for Gemma only.
        tokens = [token.replace("  ", "▁▁") for token, *_ in sentence_piece_vocabulary()]
        change["tokenizer.ggml.tokens"] = tokens
    write_gguf(file, architecture, KINDS.Q8_0, head_dim=HEAD_DIMS[architecture], model=model, change=change)
    import_gguf(file, tmp_path / "out", dtype="float32")
    compare_tensors(file, tmp_path / "out")
    compare_tokens(file, tmp_path / "out", MORE_TEXTS)


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="GGUF_FILES names no files of real models")
@pytest.mark.parametrize("name", REAL or ["none"])
def test_a_real_file_equals_what_transformers_reads(tmp_path, name):
    file = Path(name).resolve()
    import_gguf(file, tmp_path / "out", dtype="float32")
    compare_tensors(file, tmp_path / "out")
    root = Path(__file__).parents[2]
    sources = [
        path.read_text() for folder in ("rrl/models", "docs") for path in root.glob(f"{folder}/*.[pm][yd]")
    ]
    compare_tokens(file, tmp_path / "out", [*MORE_TEXTS, *sources])
