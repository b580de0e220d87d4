"""Extract the passages that come with a question. Read `passages_in` first.

They are in HotpotQA's and 2WikiMultiHopQA's `context`, MuSiQue's `paragraphs`, DPR's `ctxs`, SQuAD's paragraph or LongBench's
long `context`. FlashRAG's format has them inside `metadata`.
"""

import re
from collections.abc import Iterator
from typing import Any

from rrl.data.field_names import TEXT_FIELDS
from rrl.data.fields import fields_of, list_field

PASSAGE_WORDS = 100
"""Words per passage when a long text is split, as in DPR's and FlashRAG's Wikipedia."""

PASSAGE_LISTS = ("paragraphs", "ctxs", "contexts", "positive_ctxs", "hard_negative_ctxs", "negative_ctxs")
"""Fields with lists of {title, text}: `paragraphs` is MuSiQue's, `ctxs` that of DPR's reader files, `contexts` HippoRAG's; the
last three are those of DPR's training files."""

_NUMBERED = re.compile(r"^Passage \d+:\n", re.M)
"""The heading of each passage in LongBench's multi-document contexts."""


def has_passages(record: dict[str, Any]) -> bool:
    """Return whether the record is a question with its own passages."""
    record = _with_metadata(record)
    return bool({"question", "input"} & record.keys() and {"context", *PASSAGE_LISTS} & record.keys())


def _with_metadata(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with the passage fields of its `metadata` at the top level. Its own fields have priority."""
    metadata = record.get("metadata")
    if not isinstance(metadata, dict):
        return record
    return {name: metadata[name] for name in ("context", *PASSAGE_LISTS) if name in metadata} | record


def passages_in(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of each passage of a question. Passages with neither are skipped.

    Raises ValueError if the passages are in an unknown format.
    """
    record = _with_metadata(record)
    for name in PASSAGE_LISTS:
        for paragraph in list_field(record, name):
            fields = fields_of(paragraph)
            if not fields.keys() & set(TEXT_FIELDS):
                raise ValueError(
                    f"{name}: a passage without a text; found the fields {', '.join(list(fields)[:8])}"
                )
            text = next((fields[key] for key in TEXT_FIELDS if fields.get(key)), "")
            if not isinstance(text, str):
                raise ValueError(f"{name}: got {text!r:.60}, not a text")
            yield from _non_empty(_title(fields.get("title")), text)
    context = record.get("context")
    if isinstance(context, str):
        # A text in brackets is a list in a table cell. In LongBench's records the context is always plain text.
        text = context.strip()
        if not (text.startswith("[") and text.endswith("]")) or {"choice_A", "input"} & record.keys():
            yield from _split_context(record, context)
            return
        context = list_field(record, "context")
    if isinstance(context, dict):
        # The datasets library stores two parallel lists; FlashRAG's 2Wiki calls the second one content.
        texts = "content" if "content" in context else "sentences"
        titles, sentences = list_field(context, "title"), list_field(context, texts)
        if len(titles) != len(sentences):
            raise ValueError(f"context: {len(titles)} titles for {len(sentences)} texts")
        context = list(zip(titles, sentences, strict=True))
    for entry in list_field({"context": context}, "context"):  # null is [], and any other type is an error
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise ValueError("context: not a list of [title, [sentences]]")
        yield from _non_empty(_title(entry[0]), join_sentences(*entry))


def _split_context(record: dict[str, Any], context: str) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of each passage of a context that is one string.

    The context is LongBench's numbered passages, SQuAD's paragraph (its title is another field), or one of LongBench's long
    documents, which is split every `PASSAGE_WORDS` words. The passages of a long document have the question's id as their title.
    """
    title = record.get("title")
    if _NUMBERED.match(context.lstrip()):
        for part in _NUMBERED.split(context)[1:]:
            first, _, rest = part.strip().partition("\n")
            yield from _non_empty(first, rest) if rest.strip() else _non_empty("", first)
    elif isinstance(title, str):
        yield from _non_empty(title.strip(), context)
    elif "choice_A" in record or "input" in record:
        words, title = context.split(), str(record.get("_id", record.get("id", "")))
        for start in range(0, len(words), PASSAGE_WORDS):
            yield title, " ".join(words[start : start + PASSAGE_WORDS])
    elif context.strip():
        raise ValueError(f"context: got {context!r:.60}, not a list")


def _non_empty(title: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the passage unless title and text are empty."""
    if title or text.strip():
        yield title, text.strip()


def join_sentences(title: Any, sentences: Any) -> str:
    """Join sentences with single spaces. HotpotQA's sentences begin with a space, 2Wiki's do not."""
    if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
        raise ValueError(f"sentences of {title!r}: not all of them are strings")
    return " ".join(sentence.strip() for sentence in sentences).strip()


def _title(title: Any) -> str:
    title = "" if title is None else title
    if not isinstance(title, str):
        raise ValueError(f"title: got {title!r}, not a string")
    return title.strip()
