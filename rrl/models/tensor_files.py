"""safetensors files: any part of a tensor read through a memory map, and files written one tensor at a time.

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and place of each tensor)
and then the tensors, without gaps. The package of that name writes only what is in memory all at once.
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
"""Names of the dtypes that parameters may have in a file."""

_METADATA = "__metadata__"
_POINTER = b"version https://git-lfs"
_LENGTH = 8
"""Bytes that tell the length of the header; the header is padded to a multiple of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is."""

    file: Path
    dtype: str
    """As the file calls it; the keys of FLOATS can be read."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""

    def view(self) -> np.ndarray:
        """The tensor as a memory map: pages are read where it is indexed, and given back with it."""
        dtype, count = FLOATS[self.dtype], math.prod(self.shape)
        if not count:
            return np.empty(self.shape, dtype)
        flat = np.memmap(self.file, np.uint8, mode="r", offset=self.start, shape=(count * dtype.itemsize,))
        return flat.view(dtype).reshape(self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Where each tensor of a file is.

    Raises:
        UserError: the file is truncated or is no safetensors file.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            if stream.read(len(_POINTER)) == _POINTER:
                raise ValueError("it is the pointer that Git LFS leaves in its place, try `git lfs pull`")
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
                raise ValueError(f"tensor {name} {stored.shape} would lie in bytes {start} to {stop}")
            wide = FLOATS.get(stored.dtype)
            if wide is not None and stop - start != math.prod(stored.shape) * wide.itemsize:
                raise ValueError(f"tensor {name} {stored.shape} {stored.dtype} has {stop - start} bytes")
            tensors[name], end = stored, max(end, stop)
        if end != size:
            raise ValueError(f"its tensors end at byte {end}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} ({size} bytes) is truncated or no safetensors file: {error}; download or export it again"
        ) from error
    return tensors


class TensorFileWriter:
    """A file whose tensors are written in any order; byte for byte what the safetensors package writes.

    A context manager: at its end every tensor that was announced must have been put.
    """

    def __init__(self, file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype) -> None:
        """Writes the header: tensors of these names and shapes, all of one dtype; UserError if it is no float."""
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

    def put(self, name: str, tensor: np.ndarray) -> None:
        """Writes one tensor, converted to the file's dtype; ValueError for a shape that was not announced."""
        if tensor.shape != (announced := self._shapes.pop(name)):
            raise ValueError(f"tensor {name} has shape {tensor.shape}, announced was {announced}")
        self._stream.seek(self._first + self._starts[name])
        self._stream.write(np.ascontiguousarray(tensor, self._dtype).reshape(-1).view(np.uint8).data)

    def __enter__(self) -> "TensorFileWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stream.close()
        if kind is None and self._shapes:
            raise ValueError(f"tensors announced but not written: {', '.join(self._shapes)}")
