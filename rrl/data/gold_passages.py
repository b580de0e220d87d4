"""Read the gold passages of a question, by title and by id, from the fields of its record."""

from collections.abc import Iterator
from typing import Any

from rrl.data.field_names import PASSAGE_ID_FIELDS
from rrl.data.fields import fields_of, id_field, list_field, text_field

GOLD_IDS = (
    "gold_ids",
    "gold_doc_ids",
    "gold_pids",
    "relevant_docids",
    "relevant_doc_ids",
    "positive_ids",
    "answer_pids",
)
"""Fields with ids of gold passages: `gold_ids` is written by `save_questions` and BRIGHT, `answer_pids` by LoTTE."""
GOLD_PASSAGES = ("evidence_docs", "gold_docs", "gold_passages", "positive_passages", "positive_ctxs")
"""Fields with gold passages that have ids or titles; the first that is not empty is used. The first two are BrowseComp-Plus's:
`evidence_docs` comes first, because its recall metric counts these. The others are Tevatron's and DPR's."""


def gold_titles(fields: dict[str, Any]) -> Iterator[str]:
    """Yield titles of gold passages.

    Sources: `gold` (the format of `save_questions`), HotpotQA's [title, sentence] pairs or plain titles, MuSiQue's supporting
    paragraphs, KILT's provenance, `GOLD_PASSAGES`, and MultiHop-RAG's evidence.
    """
    facts = fields.get("supporting_facts")
    if isinstance(facts, dict):
        # The datasets library stores parallel lists.
        fields = fields | {"supporting_facts": list_field(facts, "title")}
    for fact in list_field(fields, "gold") or list_field(fields, "supporting_facts"):
        title = fact[0] if isinstance(fact, list) and fact else fact
        if not isinstance(title, str):
            raise ValueError(
                f"supporting_facts or gold: got {fact!r}, not a title or a [title, sentence] pair"
            )
        yield title
    for name in ("paragraphs", "contexts"):
        for paragraph in list_field(fields, name):
            if not isinstance(paragraph, dict) or not isinstance(paragraph.get("title", ""), str | None):
                raise ValueError(f"{name}: not a list of objects with a title")
            if paragraph.get("is_supporting") and paragraph.get("title"):
                yield paragraph["title"]
    for source in (*_provenance(fields), *_gold_passages(fields)):
        if isinstance(source.get("title"), str) and source["title"]:
            yield source["title"]
    for evidence in list_field(fields, "evidence_list"):
        yield text_field(fields_of(evidence), "title")


def gold_ids(fields: dict[str, Any]) -> Iterator[str]:
    """Yield ids of gold passages: `GOLD_IDS`, `GOLD_PASSAGES`, MuSiQue's supporting paragraphs, KILT's provenance."""
    for name in GOLD_IDS:
        value = fields.get(name)
        if isinstance(value, str) and not value.strip().startswith("["):
            value = [value.strip()] if value.strip() else []
        for identity in [value] if isinstance(value, int) else list_field(fields | {name: value}, name):
            if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
                raise ValueError(f"{name}: got {identity!r:.60}, not the id of a passage")
            yield str(identity)
    supporting = (
        paragraph
        for name in ("paragraphs", "contexts")
        for paragraph in list_field(fields, name)
        if paragraph.get("is_supporting")
    )
    for passage in (*_gold_passages(fields), *supporting):
        if any(passage.get(name) not in (None, "") for name in PASSAGE_ID_FIELDS):
            yield id_field(passage, 0, PASSAGE_ID_FIELDS)
    for source in _provenance(fields):
        if source.get("wikipedia_id") is not None:
            yield str(source["wikipedia_id"])


def _gold_passages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the passages of the first non-empty field of `GOLD_PASSAGES`."""
    for name in GOLD_PASSAGES:
        value = fields.get(name)
        passages = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
        if passages:
            return passages
    return []


def _provenance(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the sources of KILT's answers. KILT's question is the field `input`; without it, `output` is a model's text."""
    for output in list_field(fields, "output") if "input" in fields else ():
        for source in list_field(output, "provenance") if isinstance(output, dict) else ():
            if isinstance(source, dict):
                yield source
