"""The service and the client use the formats of Search-R1, FlashRAG and R1-Searcher, and their errors name the cause."""

import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rrl.data.passages import Passage
from rrl.errors import UserError
from rrl.retrieval.index import make_retriever
from rrl.retrieval.remote import RemoteIndex, open_remote
from rrl.retrieval.retriever import Retriever, RetryPolicy, SearchFailed
from rrl.retrieval.serve import MAX_BODY_BYTES, make_server
from rrl.retrieval.wire import document, parse_response

CORPUS = [
    Passage("a", "Oslo", "capital of the north"),
    Passage("b", 'The "Bergen"', "town of rain\nand fish"),
    Passage("c", "", "rain in Rome \ud800"),
]


@pytest.fixture
def served() -> Iterator[tuple[Retriever, str]]:
    retriever = make_retriever(CORPUS, "bm25")
    server = make_server(retriever, port=0, k=2)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield retriever, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def post(url: str, body: object) -> object:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as reply:
        return json.loads(reply.read())


BERGEN = {"id": "b", "contents": '"The ""Bergen"""\ntown of rain\nand fish'}


def test_search_r1_requests_are_answered_in_its_format(served: tuple[Retriever, str]) -> None:
    # As search_r1/search/retrieval_server.py of PeterGriffinJin/Search-R1 answers.
    _, url = served
    request = {"queries": ["fish", "nothing"], "topk": 1, "return_scores": True}
    answer = post(f"{url}/retrieve", request)
    assert isinstance(answer, dict)
    ((hit,), none) = answer["result"]
    assert hit["document"] == BERGEN and hit["score"] > 0 and none == []
    assert post(f"{url}/retrieve", {"queries": ["fish"]}) == {"result": [[BERGEN]]}


def test_flashrag_requests_are_answered_in_its_format(served: tuple[Retriever, str]) -> None:
    # As scripts/serving/retriever_serving.py of Agent-RL/ReSearch answers.
    _, url = served
    assert post(f"{url}/search", {"query": "fish", "top_n": 1}) == [BERGEN]
    assert post(f"{url}/batch_search", {"query": ["fish", "fish"], "top_n": 1}) == [[BERGEN], [BERGEN]]
    documents, scores = post(f"{url}/batch_search", {"query": ["fish"], "return_score": True})  # type: ignore[misc]
    assert documents == [[BERGEN]] and scores[0][0] > 0
    (found,), (score,) = post(f"{url}/search", {"query": "fish", "return_score": True})  # type: ignore[misc]
    assert (found, score) == (BERGEN, scores[0][0])


@pytest.mark.parametrize("form", ["search-r1", "flashrag"])
def test_the_client_returns_the_hits_of_the_served_index(served: tuple[Retriever, str], form: str) -> None:
    retriever, url = served
    queries = ["rain", "capital", "", "rain", "rain \ud800"]
    remote = open_remote(url, form)
    found = remote.search(queries, 3)
    assert [[(h.passage, h.score) for h in hits] for hits in found] == [
        [(h.passage, pytest.approx(h.score)) for h in hits] for hits in retriever.search(queries, 3)
    ]
    assert remote.stats.searched == 3
    assert len(remote.passages) == 3, "a passage is kept once"
    assert remote.search(queries, 10**12) == found


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/retrieve", b"{", 422, "Expecting"),
        ("/retrieve", [1], 422, "JSON object"),
        ("/retrieve", {"queries": "fish"}, 422, "queries: must be a list of strings"),
        ("/retrieve", {"queries": ["fish"], "topk": 0}, 422, "topk=0 must be"),
        ("/retrieve", {"queries": ["fish"], "topk": "3"}, 422, "topk='3' must be"),
        ("/search", {"query": ["fish"]}, 422, "query: must be a string"),
        ("/elsewhere", {}, 404, "POST /retrieve"),
    ],
)
def test_the_answer_to_a_bad_request_names_the_fault(
    served: tuple[Retriever, str], path: str, body: object, status: int, reason: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(served[1] + path, body)
    with caught.value as error:
        assert error.code == status and reason in json.loads(error.read())["detail"]
    assert post(f"{served[1]}/retrieve", {"queries": ["fish"]}) == {"result": [[BERGEN]]}


def test_a_request_that_is_too_long_is_rejected_unread(served: tuple[Retriever, str]) -> None:
    request = urllib.request.Request(
        f"{served[1]}/retrieve", b"x", {"Content-Length": str(MAX_BODY_BYTES + 1)}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as error:
        assert error.code == 413


def test_health_and_stats_are_served(served: tuple[Retriever, str]) -> None:
    for path, name, value in (("/health", "status", "healthy"), ("/stats", "calls", 0)):
        with urllib.request.urlopen(served[1] + path, timeout=60) as reply:
            assert json.loads(reply.read())[name] == value


def test_an_address_in_use_is_rejected(served: tuple[Retriever, str]) -> None:
    with pytest.raises(UserError, match=r"cannot serve on .*give another"):
        make_server(served[0], port=int(served[1].rpartition(":")[2]))


@pytest.mark.parametrize(
    ("status", "answer", "reason"),
    [
        (500, b"out of memory", "answered 500 .*out of memory"),
        (200, b"<html>", "Expecting value"),
        (200, b'{"result": [[{"score": 1}]]}', "not have the format of search-r1"),
        (200, b'{"result": []}', "0 results for 1 queries"),
    ],
)
def test_a_failing_service_raises_after_the_retries(status: int, answer: bytes, reason: str) -> None:
    with answering(status, answer) as address:
        remote = open_remote(address, retry_policy=RetryPolicy(retries=1, pause=0.01))
        with pytest.raises(SearchFailed, match=reason):
            remote.search(["x"], 1)
        assert (remote.stats.retries, remote.stats.failures) == (1, 1)


@contextlib.contextmanager
def answering(status: int, answer: bytes) -> Iterator[str]:
    """Yield the address of a service that always returns this answer."""

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_missing_service_and_a_bad_address_raise() -> None:
    with pytest.raises(SearchFailed, match="does not answer"):
        open_remote("http://127.0.0.1:9", retry_policy=RetryPolicy()).search(["x"], 1)
    with pytest.raises(UserError, match="must begin with http"):
        open_remote("localhost:8000")
    with pytest.raises(UserError, match="form='solr' is unknown"):
        open_remote("http://localhost", "solr")


def test_r1_searcher_requests_are_answered_in_its_format(served: tuple[Retriever, str]) -> None:
    # As the retrieval service of RUCAIBox/R1-Searcher answers.
    retriever, url = served
    answer = post(f"{url}/queries", {"queries": ["fish", "nothing"], "k": 1})
    line = 'b\tTitle: The "Bergen" Text: town of rain\nand fish'
    assert answer == {"queries": ["fish", "nothing"], "answers": [[line], []]}
    queries = ["rain", "capital", ""]
    found = open_remote(url, "r1-searcher").search(queries, 3)
    assert [[h.passage for h in hits] for hits in found] == [
        [h.passage for h in hits] for hits in retriever.search(queries, 3)
    ]
    assert [h.score for h in found[0]] == [1, 0.5]
    published = {"answers": [["1\tTitle: Orla Viaduct Text: Marta Quell designed it.", "only text", "\t "]]}
    first, second, nothing = parse_response("r1-searcher", published, 1)[0]
    assert first == (Passage("1", "Orla Viaduct", "Marta Quell designed it."), 1)
    assert second is not None and (second[0].title, second[0].text, second[1]) == ("", "only text", 0.5)
    assert nothing is None


ONE, TWO = (
    {"id": "1", "contents": '"Orla Viaduct"\nDesigned.'},
    {"id": "2", "contents": '"Sela River"\nJoins.'},
)


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ("search-r1", {"result": [[{"document": ONE, "score": 2.0}, {"document": TWO, "score": 1}]]}),
        ("search-r1", {"result": [[{"document": ONE}, {"document": TWO}]]}),
        ("search-r1", {"result": [[{"document": ONE, "score": None}, {"document": TWO, "score": 3.0}]]}),
        (
            "search-r1",
            {"result": [[{"document": ONE, "score": float("nan")}, {"document": TWO, "score": 3.0}]]},
        ),
        ("search-r1", {"result": [[ONE, TWO]]}),
        ("search-r1", {"result": [[ONE["contents"], TWO["contents"]]]}),
        ("search-r1", {"result": [[{"document": {"contents": doc["contents"]}} for doc in (ONE, TWO)]]}),
        ("flashrag", [[ONE, TWO]]),
        ("flashrag", [[[ONE, TWO]], [[2.0, 1.0]]]),
        ("flashrag", [[[ONE, TWO]], [[None, None]]]),
    ],
)
def test_documents_keep_their_order_with_and_without_scores(form: str, answer: object) -> None:
    (found,) = parse_response(form, answer, 1)
    hits = [hit for hit in found if hit is not None]
    assert [passage.title for passage, _ in hits] == ["Orla Viaduct", "Sela River"]
    assert hits[0][1] > hits[1][1]
    assert hits[0][0].id != hits[1][0].id


def test_two_flashrag_rows_without_scores_are_not_read_as_documents_and_scores() -> None:
    one, two = parse_response("flashrag", [[ONE], [TWO]], 2)
    assert [row[0][0].title for row in (one, two) if row[0]] == ["Orla Viaduct", "Sela River"]
    assert (
        parse_response("flashrag", [[], []], 2)
        == parse_response("flashrag", [[[], []], [[], []]], 2)
        == [[], []]
    )


def test_a_document_without_an_id_is_the_same_passage_at_every_rank() -> None:
    a, b = {"contents": "a"}, {"contents": "b"}
    one, two = parse_response("search-r1", {"result": [[a, b], [b, a]]}, 2)
    assert {hit[0].id for hit in one if hit} == {hit[0].id for hit in two if hit}


def test_a_documents_id_is_read_under_any_of_its_names() -> None:
    answer = {"result": [[{"docid": 7, "contents": "x"}, {"doc_id": "d", "contents": "y"}]]}
    ((first, second),) = parse_response("search-r1", answer, 1)
    assert first and second and (first[0].id, second[0].id) == ("7", "d")


def test_a_document_without_title_and_text_is_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    empty = [{"id": "3", "title": "", "text": None}, {"id": "4", "contents": " "}]
    with answering(200, json.dumps({"result": [[ONE, *empty, TWO]]}).encode()) as address:
        index = RemoteIndex([address])
        retriever = Retriever(index.passages, index)
        assert [hit.passage.id for hit in retriever.search(["x"], 4)[0]] == ["1", "2"]
        assert index.skipped == 2 and "neither title nor text" in caplog.text
    with pytest.raises(ValueError, match=r"not have the format of search-r1 .*id, what"):
        parse_response("search-r1", {"result": [[{"document": {"id": "1", "what": "x"}, "score": 1}]]}, 1)


def test_title_and_text_survive_the_round_trip() -> None:
    for passage in CORPUS:
        ((found,),) = parse_response("flashrag", [[[document(passage)]], [[1]]], 1)
        assert found == (passage, 1.0)
