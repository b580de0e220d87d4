"""Embeddings on disk, appended block by block: a NumPy file that is opened memory-mapped."""

import io
import os
from pathlib import Path

import numpy as np
from jaxtyping import Float

DTYPE = np.dtype("<f4")


class VectorFile:
    """Writes float32 [rows, dim] to an .npy file; opened again, it continues after the last whole block.

    Plain writes: a memory map would kill the process where the disk is full.
    """

    def __init__(self, file: Path, rows: int, dim: int, block: int):
        fields = {"descr": DTYPE.str, "fortran_order": False, "shape": (rows, dim)}
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, fields)
        header = head.getvalue()
        self.file = file
        if not file.is_file() or not _begins(file, header):
            file.write_bytes(header)
        width = dim * DTYPE.itemsize
        held = (file.stat().st_size - len(header)) // width
        self.rows = held if held == rows else held - held % block
        """How many are written."""
        os.truncate(file, len(header) + self.rows * width)

    def append(self, vectors: Float[np.ndarray, "n E"]) -> None:
        """Writes the next rows, so that they outlast a kill."""
        with self.file.open("ab") as stream:
            stream.write(np.ascontiguousarray(vectors, DTYPE).tobytes())
            stream.flush()
            os.fsync(stream.fileno())
        self.rows += len(vectors)


def _begins(file: Path, header: bytes) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(header)) == header
