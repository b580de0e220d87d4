"""Passages of a corpus, and the corpus files that hold them, in their publishers' own forms."""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rrl.data.pools import is_pool, join_sentences, pool_of
from rrl.data.records import OnError, fields_of, id_field, parse_records, text_field

ALLOWED = (
    "{id, contents} whose first line is the quoted title, {id or _id, title, text}, {title, text or body}, "
    "one object of {title: [sentences]}, questions with their context or paragraphs, or TSV or CSV with the columns id, text, "
    "title"
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
    """What `iter_passages` yields, as a list."""
    return list(iter_passages(path, on_error, skipped))


def iter_passages(
    path: str | Path, on_error: OnError = "refuse", skipped: list[str] | None = None
) -> Iterator[Passage]:
    """Stream a corpus file: FlashRAG / Search-R1, BEIR / HippoRAG, HotpotQA pools and DPR TSV (see `ALLOWED`).

    Of questions with contexts, each passage comes once, under a number as its id. A file of lines is read line by line;
    one JSON document is read whole.

    Args:
      path: the file; gzip is recognised by content.
      on_error: "refuse" raises UserError at the first broken record or repeated id; "skip" leaves them out and
        logs how many and where.
      skipped: if given, receives one "line 7: reason" for each record left out.
    """
    seen, pooled = SeenIds(), set[bytes]()

    def parse(position: int, record: Any) -> Iterable[Passage]:
        if isinstance(record, dict) and is_pool(record):
            return pool(record)
        passage = passage_of(position, record)
        if not seen.add(passage.id):
            raise ValueError(f"id: {passage.id!r} occurs twice; ids must be unique")
        return (passage,)

    def pool(record: dict[str, Any]) -> Iterator[Passage]:
        for title, text in pool_of(record):
            if (key := _digest(title, text)) not in pooled:
                yield Passage(str(len(pooled)), title, text)
                pooled.add(key)

    return parse_records(path, parse, ALLOWED, on_error, skipped)


class SeenIds:
    """The ids that have occurred. Consecutive numbers, which large corpora have, cost no memory."""

    def __init__(self) -> None:
        self._first = self._next = 0
        self._others: set[str] = set()

    def add(self, identity: str) -> bool:
        """Notes an id; False if it was there."""
        number = int(identity) if identity.isascii() and identity.isdigit() else -1
        if str(number) == identity:
            if self._first == self._next:
                self._first = self._next = number
            if number == self._next and identity not in self._others:
                self._next += 1
                return True
            if self._first <= number < self._next:
                return False
        if identity in self._others:
            return False
        self._others.add(identity)
        return True


def _digest(*parts: str) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def passage_of(position: int, record: Any) -> Passage:
    """The passage that a record holds (see `ALLOWED`); ValueError says what is wrong with it."""
    if isinstance(record, tuple):
        title, sentences = record
        return Passage(str(position), title, text_field({"text": join_sentences(title, sentences)}, "text"))
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
    return Passage(identity, title.strip(), text_field(fields, "text", "body"))


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
