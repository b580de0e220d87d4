"""The passages that come with a question: HotpotQA's and 2WikiMultiHopQA's `context`, MuSiQue's `paragraphs`, the long
`context` of LongBench-v2; in FlashRAG's form they are inside `metadata`."""

from collections.abc import Iterator
from typing import Any

from rrl.data.records import fields_of, list_field, text_field

PASSAGE_WORDS = 100
"""Words of the passages that a long text is cut into (DPR's and FlashRAG's Wikipedia)."""


def is_pool(record: dict[str, Any]) -> bool:
    """Whether the record is a question that brings its passages."""
    record = _inside(record)
    return "question" in record and ("context" in record or "paragraphs" in record)


def _inside(record: dict[str, Any]) -> dict[str, Any]:
    metadata = record.get("metadata")
    if not isinstance(metadata, dict):
        return record
    return {name: metadata[name] for name in ("context", "paragraphs") if name in metadata} | record


def pool_of(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of each passage; passages without text are left out. ValueError for another form."""
    record = _inside(record)
    for paragraph in list_field(record, "paragraphs"):
        fields = fields_of(paragraph)
        yield _title(fields.get("title", "")), text_field(fields, "paragraph_text", "text")
    context = record.get("context")
    if isinstance(context, str) and "choice_A" in record:
        words, title = context.split(), str(record.get("_id", record.get("id", "")))
        for start in range(0, len(words), PASSAGE_WORDS):
            yield title, " ".join(words[start : start + PASSAGE_WORDS])
        return
    if isinstance(context, dict):
        # The form of the datasets library: two lists side by side; FlashRAG's 2Wiki calls the second one content.
        texts = "content" if "content" in context else "sentences"
        titles, sentences = list_field(context, "title"), list_field(context, texts)
        if len(titles) != len(sentences):
            raise ValueError(f"context: {len(titles)} titles for {len(sentences)} texts")
        context = list(zip(titles, sentences, strict=True))
    for entry in list_field({"context": context}, "context"):
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise ValueError("context: not a list of [title, [sentences]]")
        title, text = _title(entry[0]), join_sentences(*entry)
        if text:
            yield title, text


def join_sentences(title: Any, sentences: Any) -> str:
    """One text; HotpotQA's sentences bring their own leading space, 2Wiki's do not."""
    if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
        raise ValueError(f"sentences of {title!r}: not all of them are strings")
    return " ".join(sentence.strip() for sentence in sentences).strip()


def _title(title: Any) -> str:
    if not isinstance(title, str):
        raise ValueError(f"title: got {title!r}, not a string")
    return title.strip()
