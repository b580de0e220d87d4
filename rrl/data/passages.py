"""Read passages from corpus files in the formats of their publishers. Read `iter_passages` first."""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rrl.data.field_names import PASSAGE_ID_FIELDS, TEXT_FIELDS
from rrl.data.fields import fields_of, id_field, list_in_text
from rrl.data.question_passages import has_passages, join_sentences, passages_in
from rrl.data.records import ExcludedRecord, OnError, parse_records

ALLOWED = (
    "{id, contents} (the first line of contents is the title if the record has no title), {id, title, text}, "
    "one object of {title: [sentences]}, questions with their context, paragraphs or ctxs, or TSV or CSV with columns of these "
    f"names; an id is one of {', '.join(PASSAGE_ID_FIELDS)}, a text one of {', '.join(TEXT_FIELDS)}"
)
"""The supported corpus formats, for error messages. JSON lines or one JSON list; plain, gzip or bzip2."""


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """One passage of a corpus."""

    id: str
    """Unique in the corpus; the position in the file if the file has no ids."""
    title: str
    text: str
    """The passage without its title."""


def load_passages(
    path: str | Path, on_error: OnError = "refuse", skipped: list[str] | None = None
) -> list[Passage]:
    """Return the passages of `iter_passages` as a list."""
    return list(iter_passages(path, on_error, skipped))


def iter_passages(
    path: str | Path,
    on_error: OnError = "refuse",
    skipped: list[str] | None = None,
    excluded: list[str] | None = None,
    columns: Sequence[str] = (),
) -> Iterator[Passage]:
    """Stream a corpus file: FlashRAG / Search-R1, BEIR / HippoRAG, DPR and MS MARCO TSV, or questions with contexts such as
    HotpotQA's (see `ALLOWED`).

    From questions with contexts, each distinct passage is yielded once, with a running number as its id. A file of lines is
    read line by line; a single JSON document is read whole. A document with neither title nor text is excluded and logged.

    Args:
      path: the file; gzip and bzip2 are recognised by content.
      on_error: "refuse" raises UserError at the first broken record or repeated id; "skip" skips them and logs how many
        and where.
      skipped: if given, receives one "line 7: reason" for each broken record.
      excluded: if given, receives one such string for each document without title and text.
      columns: the meaning of each column of a table (id, title, text, or - to ignore it), if its header does not name them.
    """
    seen, yielded = SeenIds(), set[bytes]()

    def parse(position: int, record: Any) -> Iterable[Passage]:
        if isinstance(record, dict) and has_passages(record):
            return context_passages(record)
        passage = passage_of(position, record)
        if not seen.add(passage.id):
            raise ValueError(f"id: {passage.id!r} occurs twice; ids must be unique")
        return (passage,)

    def context_passages(record: dict[str, Any]) -> Iterator[Passage]:
        for title, text in passages_in(record):
            if (key := _digest(title, text)) not in yielded:
                yield Passage(str(len(yielded)), title, text)
                yielded.add(key)

    return parse_records(path, parse, ALLOWED, on_error, skipped, excluded, columns)


class SeenIds:
    """A set of ids. Large corpora number their passages consecutively, so one run of consecutive numbers is stored as a range."""

    def __init__(self) -> None:
        # The range is [_first, _next); it is empty if the two are equal.
        self._first = self._next = 0
        self._others: set[str] = set()

    def add(self, identity: str) -> bool:
        """Add an id; return False if it was already in the set."""
        number = int(identity) if identity.isascii() and identity.isdigit() else -1
        if str(number) == identity:  # not "007", which is another id than "7"
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
    """Return a 128-bit hash of texts, to recognise repeated passages."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


_METADATA_FIELDS = ("title", "metadata", "url", "score")
"""Fields that a document without a text may have besides its ids. A record without a known text field is broken if it has any
other field, since that field may hold the text under an unknown name."""


def passage_of(position: int, record: Any) -> Passage:
    """Return the passage of a record (see `ALLOWED`).

    Raises ValueError that names what is wrong with the record, and ExcludedRecord if it has neither title nor text.
    """
    if isinstance(record, tuple):  # from one object of {title: [sentences]}
        title, sentences = record
        return _passage(str(position), title, join_sentences(title, sentences))
    fields = fields_of(record)
    identity = id_field(fields, position, PASSAGE_ID_FIELDS)
    title = fields.get("title", fields.get("wikipedia_title"))  # KILT's knowledge source
    if title is not None and not isinstance(title, str):
        raise ValueError(f"title: got {title!r}, not a string")
    title = (title or "").strip()
    name = next((name for name in (*TEXT_FIELDS, "contents") if _has_content(fields.get(name))), "")
    title_only = "title" in fields and not fields.keys() - {*PASSAGE_ID_FIELDS, *_METADATA_FIELDS}
    if not title_only and not {*TEXT_FIELDS, "contents"} & fields.keys():
        present = ", ".join(list(fields)[:8]) + (", ..." if len(fields) > 8 else "")
        raise ValueError(f"{' or '.join(TEXT_FIELDS)}: missing; found the fields {present or '(none)'}")
    text = fields.get(name, "")
    if isinstance(text, str):
        text = _sentence_list(text) or text
    if isinstance(text, list):
        text = join_sentences(title, [sentence for entry in text for sentence in _sentences(entry)])
    if not isinstance(text, str):
        raise ValueError(f"{name}: got {text!r:.60}, not a string or a list of sentences")
    return _passage(identity, *(_contents(title, text) if name == "contents" else (title, text)))


def _passage(identity: str, title: str, text: str) -> Passage:
    if not title.strip() and not text.strip():
        raise ExcludedRecord("neither a title nor a text")
    return Passage(identity, title.strip(), text.strip())


def _sentence_list(text: str) -> list[str]:
    """Return the strings of a list that a text holds in JSON or Python syntax, as in tables; [] if it holds something else."""
    try:
        listed = list_in_text(text)
    except ValueError:
        return []
    return listed if listed and all(isinstance(sentence, str) for sentence in listed) else []


def _has_content(value: Any) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


def _sentences(entry: Any) -> list[Any]:
    """Return the sentences of one entry of a text that is a list. An entry is a sentence, or a paragraph: a list of sentences."""
    return entry if isinstance(entry, list) else [entry]


def _contents(title: str, contents: str) -> tuple[str, str]:
    """Split FlashRAG's `contents` into title and text.

    The first of several lines is the title if the record has no title field. If the record has one and the first line repeats it,
    that line is dropped. A single line without a title field is the text, with one exception below.
    """
    first, _, rest = contents.strip().partition("\n")
    if title:
        return title, rest if _unquoted(first) == title else contents
    if rest.strip():
        return _unquoted(first), rest
    # A single line is the title only if it is quoted and followed by a line break, as FlashRAG writes an empty text.
    is_title = (
        contents.rstrip(" ").endswith("\n") and first.startswith('"') and _unquoted(first) != first.strip()
    )
    # Otherwise it is the text, as in corpora without titles.
    return (_unquoted(first), "") if is_title else ("", first)


def _unquoted(title: str) -> str:
    """Return a title without CSV quoting."""
    title = title.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title.replace('""', '"')


def fingerprint(passages: Iterable[Passage]) -> str:
    """Return the SHA-256 of ids, titles and texts in order; it identifies a corpus."""
    digest = hashlib.sha256()
    for passage in passages:
        for part in (passage.id, passage.title, passage.text):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def render(passages: Sequence[Passage]) -> str:
    """Return the text of an observation: one `(Title: T) text` per line, best passage first (R-Search's released code)."""
    return "\n".join(f"(Title: {passage.title}) {passage.text}" for passage in passages)
