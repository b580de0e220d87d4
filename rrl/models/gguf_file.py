"""GGUF files: reads the header, and de-quantizes tensors a few rows at a time. Read `read_gguf` and `read_tensor` first.

A file consists of the magic number, the version, the metadata, the table of tensors, and the tensors. The gguf package supplies
the quantization types and de-quantizes. Its own reader is not used, since it makes an array for each token of the vocabulary
(0.7 GB for Gemma 3) and does not compare lengths with the file's size.
"""

import dataclasses
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rrl.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_AXES = 4
"""Maximum number of axes of a tensor in GGUF."""
CHUNK = 1 << 20
"""Approximate number of values that are de-quantized at a time."""
CONVERT_AGAIN = "convert the model again with llama.cpp's convert_hf_to_gguf.py"

_SCALARS: dict[int, np.dtype] = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"), 5: np.dtype("<i4"),
    6: np.dtype("<f4"), 7: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8"),
}  # fmt: skip
"""Dtype of each scalar type of the metadata."""
_STRING, _ARRAY = 8, 9
_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class GgufTensor:
    """Location, quantization and shape of a tensor in a file."""

    name: str
    shape: tuple[int, ...]
    """Outermost axis first, as in Hugging Face; the file stores it in reverse order."""
    kind: Any
    """Quantization: a `gguf.GGMLQuantizationType`."""
    start: int
    """Offset of the tensor's first byte in the file."""
    row_bytes: int
    """Size in bytes of a row, which is the innermost axis."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return math.prod(self.shape[:-1])


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """The header of a file."""

    path: Path
    metadata: Mapping[str, Any]
    """Numbers, strings, lists of strings and arrays of numbers, by key."""
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture, which is also the prefix of its metadata."""
        return self.text("general.architecture")

    def integer(self, key: str, default: int | None = None, least: int = 0) -> int:
        """A whole number. Raises UserError if it is missing without a default, or of another type."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(
                f"{self.path}: {key}={value!r} must be a whole number of at least {least}; {CONVERT_AGAIN}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0. Raises UserError as `integer`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(f"{self.path}: {key}={value!r} must be a number above 0; {CONVERT_AGAIN}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string. Raises UserError as `integer`."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise UserError(f"{self.path}: {key}={value!r} must be a string; {CONVERT_AGAIN}")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise UserError(f"{self.path}: the metadata lack {key}; {CONVERT_AGAIN}")
        return value


def gguf_package() -> Any:
    """The gguf package. Raises UserError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            f"reading GGUF needs the package gguf, which cannot be imported ({error}): install the extra, "
            "pip install -e '.[gguf]'"
        ) from error
    return gguf


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Reads the header of a GGUF file of version 2 or 3.

    Raises:
        UserError: there is no such file; it is no GGUF file, of another version, big-endian, truncated or broken; or a tensor has
            a quantization that the gguf package does not know.
    """
    path = Path(path)
    gguf_package()
    if not path.is_file():
        raise UserError(f"gguf={path} is no file; give the path of a .gguf file")
    size = path.stat().st_size
    with path.open("rb") as stream:
        header = _Header(stream, size)
        try:
            tensors, metadata_count = _read_counts(path, header)
            metadata = _read_metadata(header, metadata_count)
            return GgufFile(path, metadata, _read_tensors(path, header, tensors, metadata))
        except (_Broken, UnicodeDecodeError) as error:
            raise UserError(
                f"{path} ({size} bytes) is truncated or broken: {error}; download it again"
            ) from error


def read_tensor(
    file: GgufFile, tensor: GgufTensor, dtype: np.dtype = _FLOAT32, add: float = 0.0
) -> np.ndarray:
    """Reads and de-quantizes a tensor. Beside the result, memory holds about `CHUNK` values.

    Args:
        file: contains the tensor.
        tensor: one of `file.tensors`.
        dtype: of the result; values are de-quantized in float32 and rounded to it.
        add: added to each value, in float32.

    Raises:
        UserError: the file is shorter than its header says, or a value is not finite in `dtype`.
    """
    dequantize = gguf_package().dequantize
    out = np.empty((tensor.rows, tensor.shape[-1]), dtype)
    step = max(1, CHUNK // tensor.shape[-1])
    with file.path.open("rb") as stream:
        stream.seek(tensor.start)
        for row in range(0, tensor.rows, step):
            part = out[row : row + step]
            data = stream.read(len(part) * tensor.row_bytes)
            if len(data) != len(part) * tensor.row_bytes:
                raise UserError(f"{file.path}: the file ends within tensor {tensor.name}; download it again")
            raw = np.frombuffer(data, np.uint8).reshape(len(part), tensor.row_bytes)
            with np.errstate(over="ignore", invalid="ignore"):  # checked below
                values = dequantize(raw, tensor.kind)
                part[...] = values + np.float32(add) if add else values  # -0.0 + 0.0 would be 0.0
            if not np.isfinite(part).all():
                fix = "choose bfloat16 or float32" if dtype == np.float16 else "download the file again"
                raise UserError(
                    f"{file.path}: tensor {tensor.name} ({tensor.kind.name}) has values that are not finite in {dtype.name}; "
                    f"{fix}"
                )
    return out.reshape(tensor.shape)


def check_quantizations(file: GgufFile) -> None:
    """Raises UserError if the gguf package cannot de-quantize one of the tensors."""
    gguf = gguf_package()
    first = {tensor.kind: tensor for tensor in reversed(list(file.tensors.values()))}
    for kind, tensor in first.items():
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError as error:
            raise UserError(
                f"{file.path}: tensor {tensor.name} has the quantization {kind.name}, which the package gguf cannot "
                "de-quantize; give another quantization of this model, such as Q4_K_M or Q8_0, or try `pip install -U gguf`"
            ) from error


class _Broken(Exception):
    """The header contradicts itself or the file's size."""


class _Header:
    """Reads values from a stream without reading beyond its end."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._size = stream, size
        self.position = 0

    def take(self, count: int, what: str) -> bytes:
        if count > self._size - self.position:
            raise _Broken(f"its {what} would end at byte {self.position + count}")
        self.position += count
        return self._stream.read(count)

    def number(self, form: str, what: str) -> int:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}"), what))[0]

    def string(self, what: str) -> str:
        return self.take(self.number("Q", what), what).decode()

    def value(self, kind: int, what: str) -> Any:
        """A value of the metadata. A float32 becomes the shortest decimal number that rounds to it."""
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(self.number("I", what), self.number("Q", what), what)
        dtype = self._dtype(kind, what)
        scalar = np.frombuffer(self.take(dtype.itemsize, what), dtype)[0]
        return float(str(scalar)) if dtype == np.float32 else scalar.item()

    def array(self, kind: int, count: int, what: str) -> list[str] | np.ndarray:
        if kind == _STRING:
            # Each string needs 8 bytes, so a wrong count fails at the end of the file at the latest.
            return [self.string(what) for _ in range(count)]
        dtype = self._dtype(kind, what)
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)

    @staticmethod
    def _dtype(kind: int, what: str) -> np.dtype:
        if kind not in _SCALARS:
            raise _Broken(f"its {what} has the unknown type {kind}")
        return _SCALARS[kind]


def _read_counts(path: Path, header: _Header) -> tuple[int, int]:
    """Numbers of tensors and of metadata. Raises UserError if the file is of another kind or version."""
    magic = header.take(len(MAGIC), "magic number")
    if magic != MAGIC:
        pointer = magic == b"vers"
        raise UserError(
            f"{path} is no GGUF file: it starts with {magic!r} instead of {MAGIC!r}; "
            + ("it may be a Git LFS pointer, try `git lfs pull`" if pointer else "give a .gguf file")
        )
    version = header.number("I", "version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = f"big-endian (version {swapped})" if swapped in VERSIONS else f"of GGUF version {version}"
        raise UserError(
            f"{path} is {what}, but only little-endian files of version 2 and 3 can be read; {CONVERT_AGAIN}"
        )
    return header.number("Q", "number of tensors"), header.number("Q", "number of metadata")


def _read_metadata(header: _Header, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = header.string(f"metadata key {index}")
        if key in metadata:
            raise _Broken(f"its metadata contain {key} twice")
        metadata[key] = header.value(header.number("I", f"metadata {key}"), f"metadata {key}")
    return metadata


def _read_tensors(
    path: Path, header: _Header, count: int, metadata: Mapping[str, Any]
) -> dict[str, GgufTensor]:
    """Reads the table of tensors, whose offsets count from the first byte after the padded header."""
    gguf = gguf_package()
    table: dict[str, GgufTensor] = {}
    for index in range(count):
        name = header.string(f"name of tensor {index}")
        what = f"tensor {name}"
        axes = header.number("I", what)
        if name in table or not 1 <= axes <= MAX_AXES:
            raise _Broken(f"it contains {what} twice" if name in table else f"its {what} has {axes} axes")
        shape = tuple(header.number("Q", what) for _ in range(axes))[::-1]
        kind_id, offset = header.number("I", what), header.number("Q", what)
        try:
            kind = gguf.GGMLQuantizationType(kind_id)
        except ValueError as error:
            raise UserError(
                f"{path}: {what} has the quantization number {kind_id}, which the package gguf does not know; try "
                "`pip install -U gguf`, or give another quantization of this model, such as Q4_K_M or Q8_0"
            ) from error
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not all(shape) or shape[-1] % block:
            raise _Broken(f"its {what} {shape} does not consist of {kind.name}'s blocks of {block} values")
        table[name] = GgufTensor(name, shape, kind, offset, shape[-1] // block * block_bytes)
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Broken(f"general.alignment={alignment!r} must be a whole number above 0")
    first = -(-header.position // alignment) * alignment
    size = path.stat().st_size
    for name, tensor in table.items():
        table[name] = tensor = dataclasses.replace(tensor, start=first + tensor.start)
        if (end := tensor.start + tensor.rows * tensor.row_bytes) > size:
            raise _Broken(f"its tensor {name} would end at byte {end}")
    return table
