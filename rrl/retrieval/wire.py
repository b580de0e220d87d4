"""The HTTP forms of the search services of Search-R1 and of FlashRAG's users: requests, answers, and documents in them.

Search-R1 (Jin et al. 2025): POST /retrieve {queries, topk, return_scores} gives {"result": [[{document, score}]]}, or
[[document]] without scores. FlashRAG's services (ReSearch, R1-Searcher): POST /batch_search {query: [...], top_n,
return_score} gives [[document]], or [[[document]], [[score]]] with scores; /search is the same for one query.
A document is {id, contents}, the contents beginning with the quoted title.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rrl.data.passages import Passage, passage_of
from rrl.retrieval.retriever import Hit

FORMS = {"search-r1": "/retrieve", "flashrag": "/batch_search"}
"""The path of each form."""


def document(passage: Passage) -> dict[str, str]:
    """A passage as these services give it."""
    title = passage.title.replace('"', '""')
    return {"id": passage.id, "contents": f'"{title}"\n{passage.text}' if title else passage.text}


def request(form: str, queries: Sequence[str], k: int) -> dict[str, Any]:
    """The body of a request for k passages of each query, with scores."""
    if form == "search-r1":
        return {"queries": list(queries), "topk": k, "return_scores": True}
    return {"query": list(queries), "top_n": k, "return_score": True}


def read_answer(form: str, answer: Any, queries: int) -> list[list[tuple[Passage, float]]]:
    """Passages and scores of each query; ValueError for anything but the form's answer."""
    try:
        if form == "search-r1":
            rows = [[(hit["document"], hit["score"]) for hit in hits] for hits in answer["result"]]
        else:
            rows = [list(zip(*pair, strict=True)) for pair in zip(*answer, strict=True)]
        found = [[(passage_of(at, doc), float(score)) for at, (doc, score) in enumerate(row)] for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"an answer in another form than {form}'s ({error!r})") from error
    if len(found) != queries:
        raise ValueError(f"{len(found)} results for {queries} queries")
    return found


def answer(
    path: str, body: Any, k: int, search: Callable[[list[str], int], list[list[Hit]]]
) -> dict[str, Any] | list[Any]:
    """What a service answers to a request; ValueError says what is wrong with it, KeyError for an unknown path."""
    names = {
        "/retrieve": ("queries", "topk", "return_scores"),
        "/batch_search": ("query", "top_n", "return_score"),
        "/search": ("query", "top_n", "return_score"),
    }[path]
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    queries, wanted, scored = (body.get(name, default) for name, default in zip(names, (None, None, False)))
    alone = path == "/search"
    queries = [queries] if alone else queries
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError(f"{names[0]}: must be a {'string' if alone else 'list of strings'}")
    wanted = k if wanted is None else wanted
    if type(wanted) is not int or wanted < 1:
        raise ValueError(f"{names[1]}={wanted!r} must be a whole number of at least 1")
    hits = search(queries, wanted)
    documents = [[document(hit.passage) for hit in row] for row in hits]
    scores = [[hit.score for hit in row] for row in hits]
    if path == "/retrieve":
        rows = [[{"document": d, "score": s} for d, s in zip(*pair)] for pair in zip(documents, scores)]
        return {"result": rows if scored else documents}
    if alone:
        return [documents[0], scores[0]] if scored else documents[0]
    return [documents, scores] if scored else documents
