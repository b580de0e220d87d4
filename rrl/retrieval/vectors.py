"""Write embeddings to a NumPy file, block by block; the complete file can be opened memory-mapped."""

import io
import os
from pathlib import Path

import numpy as np
from jaxtyping import Float

DTYPE = np.dtype("<f4")


class VectorFile:
    """Write float32 [rows, dim] to an .npy file. An incomplete file is continued after its last complete block.

    It uses plain writes, because writing to a memory map on a full disk kills the process.
    """

    def __init__(self, file: Path, rows: int, dim: int, block: int):
        """Open the file, and remove the rows of an incomplete block.

        Args:
          file: the .npy file; it is made if it is missing or has another header.
          rows: number of rows of the complete file.
          dim: length of a row.
          block: rows that each `append` but the last writes.
        """
        fields = {"descr": DTYPE.str, "fortran_order": False, "shape": (rows, dim)}
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, fields)
        header = head.getvalue()
        self.file = file
        if not file.is_file() or not _starts_with(file, header):
            file.write_bytes(header)
        row_bytes = dim * DTYPE.itemsize
        present = (file.stat().st_size - len(header)) // row_bytes
        # The last block of a complete file may be shorter than the others.
        self.rows = present if present == rows else present - present % block
        """Number of rows written so far."""
        os.truncate(file, len(header) + self.rows * row_bytes)

    def append(self, vectors: Float[np.ndarray, "n E"]) -> None:
        """Write the next rows and flush them to disk."""
        with self.file.open("ab") as stream:
            stream.write(np.ascontiguousarray(vectors, DTYPE).tobytes())
            stream.flush()
            os.fsync(stream.fileno())
        self.rows += len(vectors)


def _starts_with(file: Path, header: bytes) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(header)) == header
