"""HTTP formats of the search services of Search-R1, FlashRAG and R1-Searcher: requests, answers and documents.

- Search-R1 (Jin et al. 2025): POST /retrieve {queries, topk, return_scores} returns {"result": [[{document, score}]]}, or
  {"result": [[document]]} without scores.
- FlashRAG's services (ReSearch): POST /batch_search {query: [...], top_n, return_score} returns [[document]], or
  [[[document]], [[score]]] with scores. /search is the same for one query.
- R1-Searcher: POST /queries {queries, k} returns {"answers": [["ID\\tTitle: TITLE Text: TEXT"]]}.

A document is {id, contents}; the contents begin with the quoted title. Scores and ids may be missing from an answer, and a
document may be a plain string.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from rrl.data.field_names import PASSAGE_ID_FIELDS
from rrl.data.passages import Passage, passage_of
from rrl.retrieval.retriever import Hit

FORMS = {"search-r1": "/retrieve", "flashrag": "/batch_search", "r1-searcher": "/queries"}
"""Formats of requests and answers by name, and the URL path of each."""

_REQUEST_FIELDS = {
    "/retrieve": ("queries", "topk", "return_scores"),
    "/batch_search": ("query", "top_n", "return_score"),
    "/search": ("query", "top_n", "return_score"),
    "/queries": ("queries", "k", ""),
}
"""By URL path: the fields of a request that hold its queries, the number of passages, and whether to return scores. An empty
name is no field."""

_R1_SEARCHER_DOCUMENT = re.compile(r"(?:(\S+)\t)?(?:Title:[ ]*(.*?)[ ]*Text:[ ]*)?(.*)", re.DOTALL)
"""Matches the id, title and text of a document of R1-Searcher's service."""
_TEXT_FIELDS = ("title", "contents", "text", "body")
"""Fields of a document that may hold its title or text."""


def document(passage: Passage) -> dict[str, str]:
    """Return a passage as a document of these services."""
    title = passage.title.replace('"', '""')
    return {"id": passage.id, "contents": f'"{title}"\n{passage.text}' if title else passage.text}


def _r1_searcher_document(passage: Passage) -> str:
    """Return a passage as a document of R1-Searcher's service."""
    title = f"Title: {passage.title} Text: " if passage.title else ""
    return f"{passage.id}\t{title}{passage.text}"


def _read_r1_searcher(document: str) -> dict[str, str]:
    match = _R1_SEARCHER_DOCUMENT.fullmatch(document)
    assert match is not None
    return {"id": match[1], "title": match[2], "text": match[3].strip()}


def request_body(form: str, queries: Sequence[str], k: int) -> dict[str, Any]:
    """Return the body of a request for k passages of each query, with scores."""
    if form == "search-r1":
        return {"queries": list(queries), "topk": k, "return_scores": True}
    if form == "r1-searcher":
        return {"queries": list(queries), "k": k}
    return {"query": list(queries), "top_n": k, "return_score": True}


def parse_response(form: str, answer: Any, queries: int) -> list[list[tuple[Passage, float] | None]]:
    """Return passages and scores of each query, best first; None for a document with neither title nor text.

    If any score of a query is missing, null or not finite, its scores are 1 / rank, in the order of the answer.
    Raises ValueError if the answer does not have this format.
    """
    try:
        results = [
            _with_scores([_passage(doc) for doc, _ in row], [score for _, score in row])
            for row in _rows(form, answer)
        ]
    except (KeyError, TypeError, ValueError) as error:
        fields = f", the fields {', '.join(map(str, answer))}" if isinstance(answer, dict) else ""
        raise ValueError(f"the answer does not have the format of {form} ({error!r}{fields})") from error
    if len(results) != queries:
        raise ValueError(f"{len(results)} results for {queries} queries")
    return results


def _rows(form: str, answer: Any) -> list[list[tuple[Any, Any]]]:
    """Return the documents of each query with their scores, or None for a missing score."""
    if form == "search-r1":
        return [[_document_and_score(hit) for hit in hits] for hits in answer["result"]]
    if form == "r1-searcher":
        return [[(_read_r1_searcher(doc), None) for doc in docs] for docs in answer["answers"]]
    # With scores, answer[0] is a list of lists of documents. Without, it is a list of documents, which are objects or strings.
    has_scores = len(answer) == 2 and answer[0] and all(isinstance(row, list) for row in answer[0])
    if has_scores:
        return [list(zip(*pair, strict=True)) for pair in zip(*answer, strict=True)]
    return [[(doc, None) for doc in row] for row in answer]


def _document_and_score(hit: Any) -> tuple[Any, Any]:
    return (hit["document"], hit.get("score")) if isinstance(hit, dict) and "document" in hit else (hit, None)


def _with_scores(
    passages: Sequence[Passage | None], scores: Sequence[Any]
) -> list[tuple[Passage, float] | None]:
    if all(isinstance(score, int | float | str) and math.isfinite(float(score)) for score in scores):
        ranked = [float(score) for score in scores]
    else:
        ranked = [1 / rank for rank in range(1, len(passages) + 1)]
    return [None if passage is None else (passage, score) for passage, score in zip(passages, ranked)]


def _passage(doc: Any) -> Passage | None:
    """Return the passage of a document, or None if it has neither title nor text.

    A document without an id gets a hash of its content, so that the same document is the same passage at every rank.
    """
    doc = {"contents": doc} if isinstance(doc, str) else doc
    if not isinstance(doc, dict):
        raise ValueError(f"a document must be an object or a string, got {doc!r:.60}")
    texts = [doc[name] for name in _TEXT_FIELDS if name in doc]
    if texts and all(text is None or (isinstance(text, str) and not text.strip()) for text in texts):
        return None
    given = {name: value for name, value in doc.items() if value is not None}
    passage = passage_of(0, given)  # a document without an id gets the id 0, which is replaced below
    if any(name in given for name in PASSAGE_ID_FIELDS):
        return passage
    content = hashlib.sha256(f"{passage.title}\n{passage.text}".encode("utf-8", "surrogatepass"))
    return dataclasses.replace(passage, id=content.hexdigest()[:16])


def handle_request(
    path: str, body: Any, k: int, search: Callable[[list[str], int], list[list[Hit]]]
) -> dict[str, Any] | list[Any]:
    """Return the answer of a service to a request. Raises ValueError for a bad request, KeyError for an unknown path."""
    queries_field, top_k_field, scores_field = _REQUEST_FIELDS[path]
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    queries, top_k = body.get(queries_field), body.get(top_k_field)
    return_scores = body.get(scores_field, False)
    single = path == "/search"
    queries = [queries] if single else queries
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError(f"{queries_field}: must be a {'string' if single else 'list of strings'}")
    top_k = k if top_k is None else top_k
    if type(top_k) is not int or top_k < 1:
        raise ValueError(f"{top_k_field}={top_k!r} must be a whole number of at least 1")
    hits = search(queries, top_k)
    if path == "/queries":
        return {
            "queries": queries,
            "answers": [[_r1_searcher_document(hit.passage) for hit in row] for row in hits],
        }
    documents = [[document(hit.passage) for hit in row] for row in hits]
    scores = [[hit.score for hit in row] for row in hits]
    if path == "/retrieve":
        rows = [[{"document": d, "score": s} for d, s in zip(*row)] for row in zip(documents, scores)]
        return {"result": rows if return_scores else documents}
    if single:
        return [documents[0], scores[0]] if return_scores else documents[0]
    return [documents, scores] if return_scores else documents
