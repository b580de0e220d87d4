"""Embeddings are appended to a file block by block."""

from pathlib import Path

import numpy as np

from rrl.retrieval.vectors import VectorFile


def test_embeddings_continue_after_the_last_complete_block(tmp_path: Path) -> None:
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    file = VectorFile(tmp_path / "e.npy", 8, 3, block=3)
    file.append(rows[:3])
    with (tmp_path / "e.npy").open("ab") as stream:
        stream.write(b"half a block")
    again = VectorFile(tmp_path / "e.npy", 8, 3, block=3)
    assert again.rows == 3
    again.append(rows[3:6])
    again.append(rows[6:])
    np.testing.assert_array_equal(np.load(tmp_path / "e.npy"), rows)
    assert VectorFile(tmp_path / "e.npy", 8, 3, block=3).rows == 8
