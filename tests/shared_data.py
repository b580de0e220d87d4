"""Where the real data lies that some tests use: beside the repository, and never in it."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared(name: str) -> Path:
    """The path of a real data file; the calling test is skipped where it is absent."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"real data absent: ../shared/data/{name}")
    return path
