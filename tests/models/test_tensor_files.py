"""safetensors files equal those of the safetensors package, and broken files are refused with the reason."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from rrl.errors import UserError
from rrl.models.tensor_files import TensorFileWriter, read_header

SHAPES = {"layers.10.é": (3, 5), "layers.9": (7,), "empty": (0, 4), "one": ()}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_a_file_equals_that_of_the_safetensors_package_byte_for_byte(tmp_path, dtype):
    tensors = {name: np.random.default_rng(0).normal(size=s).astype(dtype) for name, s in SHAPES.items()}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    with TensorFileWriter(tmp_path / "ours", SHAPES, np.dtype(dtype)) as file:
        for name in reversed(SHAPES):
            file.write(name, tensors[name])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    for name, stored in read_header(tmp_path / "theirs").items():
        assert stored.view().dtype == dtype
        np.testing.assert_array_equal(stored.view(), tensors[name])


def test_every_declared_tensor_must_be_written(tmp_path):
    with (
        pytest.raises(ValueError, match="not written: one"),
        TensorFileWriter(tmp_path / "file", {"one": (2,)}, np.dtype(np.float32)),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"shape \(3,\), but \(2,\) was declared"),
        TensorFileWriter(tmp_path / "file", {"one": (2,)}, np.dtype(np.float32)) as file,
    ):
        file.write("one", np.zeros(3))


def write(file, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        (b"{", b"", "truncated or not a safetensors"),
        (b"\xff\xfe", b"", "truncated or not a safetensors"),
        ({"w": {"dtype": "F32", "shape": [2, 3]}}, b"", "data_offsets"),
        (
            {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
            b"1234567",
            r"tensor w \(2,\) would be",
        ),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, b"", r"tensor w \(2,\) would be"),
        (
            {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
            b"12345678",
            r"\(3,\) F32 has 8 bytes",
        ),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345", "its tensors end at byte"),
    ],
)
def test_a_broken_file_is_refused_with_the_reason(tmp_path, header, data, reason):
    write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(UserError, match=rf"model.safetensors \(\d+ bytes\) is truncated.*{reason}|{reason}"):
        read_header(tmp_path / "model.safetensors")
