"""Reading GGUF headers and tensors: every quantization, and files that are broken at any place."""

import struct
import sys

import numpy as np
import pytest

from rrl.errors import UserError
from rrl.models import gguf_file
from rrl.models.gguf_file import check_quantizations, read_gguf, read_tensor
from tests.models.tiny_gguf import KINDS, gguf, write_gguf


def dequantizes(kind):
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def written(file, name, data, kind):
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("kind", [kind for kind in KINDS if dequantizes(kind)], ids=lambda kind: kind.name)
def test_every_quantization_is_read_in_parts_as_in_one(tmp_path, monkeypatch, kind):
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = 256 // min(block, 256)
    # No byte is above 0x3f, so that every scale is finite.
    raw = np.random.default_rng(0).integers(0, 64, (37, blocks * block_bytes), np.uint8)
    view = {KINDS.F32: np.float32, KINDS.F16: np.float16}.get(kind, np.uint8)
    file = read_gguf(written(tmp_path / "one.gguf", "x", raw.view(view), kind))
    assert file.tensors["x"].shape == (37, blocks * block)
    monkeypatch.setattr(gguf_file, "CHUNK", 5 * 256)
    np.testing.assert_array_equal(read_tensor(file, file.tensors["x"]), gguf.dequantize(raw, kind))
    check_quantizations(file)


def test_a_quantization_without_a_decoder_is_named(tmp_path):
    file = read_gguf(written(tmp_path / "one.gguf", "x", np.zeros((2, 32), np.int8), KINDS.I8))
    with pytest.raises(UserError, match="tensor x has the quantization I8"):
        check_quantizations(file)


def test_metadata_have_their_written_values(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", change={"a": True, "b": [1, 2], "c": 1e-5, "d": "é"})
    metadata = read_gguf(tmp_path / "tiny.gguf").metadata
    assert metadata["a"] is True
    assert metadata["b"].tolist() == [1, 2]
    assert metadata["c"] == 1e-5  # the file holds it in float32
    assert metadata["d"] == "é"


def test_a_file_that_ends_anywhere_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    broken = tmp_path / "broken.gguf"
    for length in (0, 3, 4, 8, 20, 40, 200, 3000, 9000, 15000, 20000, len(content) // 2, len(content) - 64):
        broken.write_bytes(content[:length])
        with pytest.raises(UserError, match=r"broken.gguf"):
            read_gguf(broken)


@pytest.mark.parametrize(
    ("start", "named"),
    [
        (b"GGML", "is no GGUF file: it starts with b'GGML'"),
        (b"version https://git-lfs", "git lfs pull"),
        (struct.pack("<4sI", b"GGUF", 1), "of GGUF version 1"),
        (struct.pack(">4sI", b"GGUF", 3), "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 9, 0), "name of tensor"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 9), "metadata key"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 4, 1000), "metadata a would end"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 8, 1000), "metadata a would end"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"a", 77), "metadata a has the unknown type 77"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 1, 0, 1, b"x", 99), "tensor x has 99 axes"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"x", 1, 32, 99, 0), "x has the quantization number 99"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"x", 1, 31, 8, 0), "blocks of 32 values"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"x", 1, 32, 0, 1 << 20), "tensor x would end at byte"),
    ],
)  # fmt: skip
def test_a_broken_header_is_named(tmp_path, start, named):
    (tmp_path / "broken.gguf").write_bytes(start)
    with pytest.raises(UserError) as error:
        read_gguf(tmp_path / "broken.gguf")
    assert named in str(error.value)


def test_values_that_are_not_finite_are_refused(tmp_path):
    data = np.zeros((2, 32), np.float32)
    data[1, 3] = np.nan
    file = read_gguf(written(tmp_path / "one.gguf", "x", data, KINDS.F32))
    with pytest.raises(UserError, match=r"tensor x .* not finite"):
        read_tensor(file, file.tensors["x"])


def test_the_error_without_the_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"needs the package gguf.*pip install -e '\.\[gguf\]'"):
        read_gguf(tmp_path / "any.gguf")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no\.gguf is no file"):
        read_gguf(tmp_path / "no.gguf")
