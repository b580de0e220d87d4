"""Passages of a corpus, and the corpus files that hold them, in their publishers' own forms."""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rrl.data.pools import is_pool, join_sentences, pool_of
from rrl.data.records import ExcludedRecord, OnError, fields_of, id_field, parse_records
from rrl.data.tables import PASSAGE_IDS, TEXTS

ALLOWED = (
    "{id, contents} whose first line is the title where no title is beside it, {id, title, text}, "
    "one object of {title: [sentences]}, questions with their context, paragraphs or ctxs, or TSV or CSV with columns of these "
    f"names; an id is one of {', '.join(PASSAGE_IDS)}, a text one of {', '.join(TEXTS)}"
)
"""The corpus forms that are understood; JSON lines or one JSON list, plain, gzip or bzip2."""


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
    path: str | Path,
    on_error: OnError = "refuse",
    skipped: list[str] | None = None,
    left_out: list[str] | None = None,
    columns: Sequence[str] = (),
) -> Iterator[Passage]:
    """Stream a corpus file: FlashRAG / Search-R1, BEIR / HippoRAG, HotpotQA pools, DPR and MS MARCO TSV (see `ALLOWED`).

    Of questions with contexts, each passage comes once, under a number as its id. A file of lines is read line by line;
    one JSON document is read whole. A document with neither title nor text is left out, and logged.

    Args:
      path: the file; gzip and bzip2 are recognised by content.
      on_error: "refuse" raises UserError at the first broken record or repeated id; "skip" leaves them out and
        logs how many and where.
      skipped: if given, receives one "line 7: reason" for each broken record.
      left_out: if given, receives the same for each document without title and text.
      columns: of a table, what each column is (id, title, text, or - for none), where its header does not say it.
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

    return parse_records(path, parse, ALLOWED, on_error, skipped, left_out, columns)


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


_BESIDE = ("title", "metadata", "url", "score")
"""What a document may have beside its id where it has no text; a field of another name may be its text."""


def passage_of(position: int, record: Any) -> Passage:
    """The passage that a record holds (see `ALLOWED`); ValueError names what is wrong with it; ExcludedRecord: it has neither
    title nor text."""
    if isinstance(record, tuple):
        title, sentences = record
        return _passage(str(position), title, join_sentences(title, sentences))
    fields = fields_of(record)
    identity = id_field(fields, position, PASSAGE_IDS)
    title = fields.get("title", fields.get("wikipedia_title"))  # KILT's knowledge source
    if title is not None and not isinstance(title, str):
        raise ValueError(f"title: got {title!r}, not a string")
    title = (title or "").strip()
    name = next((name for name in (*TEXTS, "contents") if _filled(fields.get(name))), "")
    known = "title" in fields and not fields.keys() - {*PASSAGE_IDS, *_BESIDE}
    if not known and not {*TEXTS, "contents"} & fields.keys():
        found = ", ".join(list(fields)[:8]) + (", ..." if len(fields) > 8 else "")
        raise ValueError(f"{' or '.join(TEXTS)}: missing; found the fields {found or '(none)'}")
    text = fields.get(name, "")
    if isinstance(text, list):
        text = join_sentences(title, [part for entry in text for part in _flat(entry)])
    if not isinstance(text, str):
        raise ValueError(f"{name}: got {text!r:.60}, not a string or a list of sentences")
    return _passage(identity, *(_contents(title, text) if name == "contents" else (title, text)))


def _passage(identity: str, title: str, text: str) -> Passage:
    if not title.strip() and not text.strip():
        raise ExcludedRecord("neither a title nor a text")
    return Passage(identity, title.strip(), text.strip())


def _filled(value: Any) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


def _flat(entry: Any) -> list[Any]:
    """The sentences of a paragraph, where a text is a list of paragraphs."""
    return entry if isinstance(entry, list) else [entry]


def _contents(title: str, contents: str) -> tuple[str, str]:
    """Title and text of FlashRAG's contents: their first line is the title, if none stands beside them or that one is it."""
    first, _, rest = contents.strip().partition("\n")
    if title:
        return title, rest if _unquoted(first) == title else contents
    if rest.strip():
        return _unquoted(first), rest
    alone = (
        contents.rstrip(" ").endswith("\n") and first.startswith('"') and _unquoted(first) != first.strip()
    )
    # Corpora without titles put the text in the first line.
    return (_unquoted(first), "") if alone else ("", first)


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
