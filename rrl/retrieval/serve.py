"""Our retriever as an HTTP service in the forms of Search-R1, FlashRAG's users and R1-Searcher (see `wire`)."""

import dataclasses
import json
import logging
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rrl.errors import UserError
from rrl.retrieval.batched_searches import BatchedSearches
from rrl.retrieval.retriever import Retriever, SearchFailed
from rrl.retrieval.wire import answer

MOST_BYTES = 64 << 20
"""Of a request."""


def make_server(
    retriever: Retriever, host: str = "127.0.0.1", port: int = 8000, k: int = 3
) -> ThreadingHTTPServer:
    """A server that `serve_forever` starts; port 0 takes a free one, which `server_port` tells. Requests that come at the same
    time are searched together.

    `k` is what a request without a number gets. GET /health says that it lives, GET /stats what it did. Raises
    UserError where the address can't be had.
    """

    class Service(_Service):
        pass

    Service.retriever, Service.joined, Service.k = retriever, BatchedSearches(retriever), k
    try:
        return ThreadingHTTPServer((host, port), Service)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot serve on {host}:{port} ({error}); give another --host or --port") from error


class _Service(BaseHTTPRequestHandler):
    retriever: Retriever
    joined: BatchedSearches
    k: int
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self) -> None:
        """Searches."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MOST_BYTES:
            # What follows was not read, so the connection is of no more use.
            self.close_connection = True
            self._reply(
                413 if length.isdigit() else 411, {"detail": f"at most {MOST_BYTES} bytes, with their length"}
            )
            return
        try:
            self._reply(
                200,
                answer(self.path, json.loads(self.rfile.read(int(length))), self.k, self.joined.search),
            )
        except KeyError:
            self._reply(
                404, {"detail": "POST /retrieve, /search, /batch_search or /queries; GET /health or /stats"}
            )
        except (ValueError, RecursionError) as error:
            self._reply(422, {"detail": str(error)})
        except SearchFailed as error:
            self._reply(503, {"detail": str(error)})
        except Exception as error:  # one bad request must not look like a dead server
            logging.getLogger(__name__).exception("request failed")
            self._reply(500, {"detail": repr(error)})

    def do_GET(self) -> None:
        """Tells how it is."""
        if self.path == "/health":
            self._reply(200, {"status": "healthy", "retrievers": {"total": 1, "available": 1}})
        elif self.path == "/stats":
            self._reply(200, dataclasses.asdict(self.retriever.stats))
        else:
            self._reply(404, {"detail": "GET /health or /stats"})

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing of single requests; /stats counts them."""

    def _reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
