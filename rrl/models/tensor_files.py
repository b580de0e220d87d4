"""safetensors files: reads any part of a tensor through a memory map, and writes files one tensor at a time.

A file consists of the header's length (8 bytes, little-endian), the header (JSON: dtype, shape and offsets of each tensor)
and the tensors, without gaps. The safetensors package can only write tensors that are all in memory.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import jax.numpy as jnp
import numpy as np

from rrl.errors import UserError

FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
"""Supported dtypes, by their safetensors names."""

_METADATA = "__metadata__"
_POINTER = b"version https://git-lfs"
_LENGTH = 8
"""Size in bytes of the header's length field; the header is padded to a multiple of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location, dtype and shape of a tensor in a file."""

    file: Path
    dtype: str
    """safetensors name of the dtype; the keys of FLOATS are supported."""
    shape: tuple[int, ...]
    start: int
    """Offset of the tensor's first byte in the file."""

    def view(self) -> np.ndarray:
        """The tensor as a memory map: indexing reads only the pages that are needed, and they are freed with the array."""
        dtype, count = FLOATS[self.dtype], math.prod(self.shape)
        if not count:
            return np.empty(self.shape, dtype)
        flat = np.memmap(self.file, np.uint8, mode="r", offset=self.start, shape=(count * dtype.itemsize,))
        return flat.view(dtype).reshape(self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Reads the header: the location of each tensor of a file, by name.

    Raises:
        UserError: the file is truncated or not a safetensors file.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            if stream.read(len(_POINTER)) == _POINTER:
                raise ValueError("it is a Git LFS pointer, try `git lfs pull`")
            stream.seek(0)
            length = int.from_bytes(stream.read(_LENGTH), "little")
            if size < _LENGTH or length > size - _LENGTH:
                raise ValueError(f"its header would end at byte {_LENGTH + length}")
            header = json.loads(stream.read(length).decode())
        first = _LENGTH + length
        tensors, end = {}, first
        for name, tensor in header.items():
            if name == _METADATA:
                continue
            start, stop = (first + offset for offset in tensor["data_offsets"])
            stored = StoredTensor(file, tensor["dtype"], tuple(tensor["shape"]), start)
            if start < first or stop > size:
                raise ValueError(f"tensor {name} {stored.shape} would be in bytes {start} to {stop}")
            dtype = FLOATS.get(stored.dtype)
            if dtype is not None and stop - start != math.prod(stored.shape) * dtype.itemsize:
                raise ValueError(f"tensor {name} {stored.shape} {stored.dtype} has {stop - start} bytes")
            tensors[name], end = stored, max(end, stop)
        if end != size:
            raise ValueError(f"its tensors end at byte {end}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} ({size} bytes) is truncated or not a safetensors file: {error}; download or export it again"
        ) from error
    return tensors


class TensorFileWriter:
    """Writes a safetensors file, tensor by tensor in any order, with the same bytes as the safetensors package.

    A context manager: at its end all declared tensors must have been written.
    """

    def __init__(self, file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype) -> None:
        """Writes the header with the names and shapes of all tensors. Raises UserError if `dtype` is not a supported float."""
        name = next((name for name, known in FLOATS.items() if known == dtype), None)
        if name is None:
            raise UserError(f"dtype={dtype} cannot be written; choose float32, bfloat16 or float16")
        header: dict[str, object] = {_METADATA: {"format": "pt"}}
        self._dtype, self._shapes = dtype, dict(shapes)
        self._starts: dict[str, int] = {}
        self.size = 0
        """Bytes of all tensors."""
        for tensor in sorted(shapes):
            self._starts[tensor] = self.size
            self.size += math.prod(shapes[tensor]) * dtype.itemsize
            header[tensor] = {
                "dtype": name,
                "shape": list(shapes[tensor]),
                "data_offsets": [self._starts[tensor], self.size],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _LENGTH)
        self._first = _LENGTH + len(text)
        self._stream: BinaryIO = file.open("wb")
        self._stream.write(len(text).to_bytes(_LENGTH, "little") + text)

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Writes one tensor, converted to the file's dtype. Raises ValueError if its shape differs from the declared one."""
        if tensor.shape != (declared := self._shapes.pop(name)):
            raise ValueError(f"tensor {name} has shape {tensor.shape}, but {declared} was declared")
        self._stream.seek(self._first + self._starts[name])
        self._stream.write(np.ascontiguousarray(tensor, self._dtype).reshape(-1).view(np.uint8).data)

    def __enter__(self) -> "TensorFileWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stream.close()
        if kind is None and self._shapes:
            raise ValueError(f"tensors declared but not written: {', '.join(self._shapes)}")
