"""Open data files and decode their lines: plain, gzip or bzip2; UTF-8 with or without a byte order mark."""

import bz2
import codecs
import dataclasses
import gzip
from pathlib import Path
from typing import BinaryIO

COMPRESSED_ENDINGS = (".gz", ".bz2")
"""File name endings of compressed files. `open_decompressed` ignores them: it detects compression by content."""


@dataclasses.dataclass(frozen=True, slots=True)
class BrokenRecord:
    """A record that could not be read."""

    reason: str


def decompressed_name(path: Path) -> str:
    """Return the name of a file without its compression ending: "a.tsv" for "a.tsv.gz"."""
    return path.stem if path.suffix in COMPRESSED_ENDINGS else path.name


def open_decompressed(path: Path) -> BinaryIO:
    """Open a file as a stream of decompressed bytes; compression is detected by the magic bytes."""
    stream = path.open("rb")
    magic = stream.read(3)
    stream.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return gzip.open(stream)  # type: ignore[return-value]
    return bz2.open(stream) if magic == b"BZh" else stream  # type: ignore[return-value]


def decode(line: bytes) -> str | BrokenRecord:
    """Return the text of a line without a byte order mark, or a `BrokenRecord` if it is not UTF-8."""
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return BrokenRecord("UTF-16, not UTF-8")
        return BrokenRecord(f"not UTF-8 (byte {error.start + 1} of the line)")
