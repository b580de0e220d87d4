"""Files that are whole or not there, whatever kills us."""

import os
import pathlib
import uuid


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a text file by way of one beside it, so that a reader sees the old one or the new one; its folder must be there.

    Others may read it as they may any new file of ours, and may write the same one at the same time.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
