"""From the bytes of a data file to text: gzip and bzip2 by their first bytes, UTF-8 with or without a byte order mark."""

import bz2
import codecs
import dataclasses
import gzip
from pathlib import Path
from typing import BinaryIO

COMPRESSED = (".gz", ".bz2")
"""Endings of compressed files. Only names need them; `open_plain` looks at the content."""


@dataclasses.dataclass(frozen=True, slots=True)
class BrokenRecord:
    """A record that could not be read."""

    reason: str


def plain_name(path: Path) -> str:
    """The name of a file without the ending of its compression: "a.tsv" for "a.tsv.gz"."""
    return path.stem if path.suffix in COMPRESSED else path.name


def open_plain(path: Path) -> BinaryIO:
    """The decompressed bytes of a file, as a stream."""
    stream = path.open("rb")
    magic = stream.read(3)
    stream.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return gzip.open(stream)  # type: ignore[return-value]
    return bz2.open(stream) if magic == b"BZh" else stream  # type: ignore[return-value]


def decode(line: bytes) -> str | BrokenRecord:
    """The text of a line, without a byte order mark."""
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return BrokenRecord("UTF-16, not UTF-8")
        return BrokenRecord(f"not UTF-8 (byte {error.start + 1} of the line)")
