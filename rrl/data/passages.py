"""Passages of a corpus, and the corpus files that hold them, in their publishers' own forms."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rrl.data.records import OnError, fields_of, id_field, load_records, text_field

ALLOWED = (
    "{id, contents} whose first line is the quoted title, {id or _id, title, text}, {title, text}, "
    "one object of {title: [sentences]}, or TSV with the columns id, text, title"
)
"""The corpus forms that are understood; JSON lines or one JSON list, gzipped or not."""


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """One passage of a corpus."""

    id: str
    """Unique in the corpus; the position in the file where the file gives none."""
    title: str
    text: str
    """The passage without its title."""


def load_passages(
    path: str | Path, on_error: OnError = "refuse", skipped: list[str] | None = None
) -> list[Passage]:
    """Read a corpus file: FlashRAG / Search-R1, BEIR / HippoRAG, HotpotQA pools and DPR TSV (see `ALLOWED`).

    Args:
      path: the file; gzip is recognised by content.
      on_error: "refuse" raises UserError at the first broken record or repeated id; "skip" leaves them out and
        logs how many and where.
      skipped: if given, receives one "line 7: reason" for each record left out.
    """
    seen: set[str] = set()

    def parse(position: int, record: Any) -> Passage:
        passage = _passage(position, record)
        if passage.id in seen:
            raise ValueError(f"id: {passage.id!r} occurs twice; ids must be unique")
        seen.add(passage.id)
        return passage

    return load_records(path, parse, ALLOWED, on_error, skipped)


def _passage(position: int, record: Any) -> Passage:
    if isinstance(record, tuple):
        title, sentences = record
        if not all(isinstance(sentence, str) for sentence in sentences):
            raise ValueError(f"sentences of {title!r}: not all of them are strings")
        # HotpotQA's sentences bring their own leading space, 2Wiki's do not.
        text = " ".join(sentence.strip() for sentence in sentences)
        return Passage(str(position), title, text_field({"text": text}, "text"))
    fields = fields_of(record)
    identity = id_field(fields, position)
    if "contents" in fields and "text" not in fields:
        first, _, text = text_field(fields, "contents").partition("\n")
        # Corpora without titles put the text in the first line.
        return (
            Passage(identity, _unquoted(first), text.strip())
            if text.strip()
            else Passage(identity, "", first)
        )
    title = fields.get("title") or ""
    if not isinstance(title, str):
        raise ValueError(f"title: got {title!r}, not a string")
    return Passage(identity, title.strip(), text_field(fields, "text"))


def _unquoted(title: str) -> str:
    title = title.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title.replace('""', '"')


def fingerprint(passages: Iterable[Passage]) -> str:
    """SHA-256 over ids, titles and texts in order: two corpora are the same exactly if this is."""
    digest = hashlib.sha256()
    for passage in passages:
        for part in (passage.id, passage.title, passage.text):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def render(passages: Sequence[Passage]) -> str:
    """The observation text: `(Title: T) text`, one passage a line (R-Search as released; best first)."""
    return "\n".join(f"(Title: {passage.title}) {passage.text}" for passage in passages)
