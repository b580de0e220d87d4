"""Serve a retriever over HTTP in the formats of Search-R1, FlashRAG and R1-Searcher (see `wire`)."""

import dataclasses
import json
import logging
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rrl.errors import UserError
from rrl.retrieval.batched_searches import BatchedSearches
from rrl.retrieval.retriever import Retriever, SearchFailed
from rrl.retrieval.wire import handle_request

MAX_BODY_BYTES = 64 << 20
"""Largest body of a request."""


def make_server(
    retriever: Retriever, host: str = "127.0.0.1", port: int = 8000, k: int = 3
) -> ThreadingHTTPServer:
    """Return a server; its `serve_forever` starts it. Requests that arrive at the same time are searched together.

    GET /health answers while the server runs; GET /stats returns `RetrieverStats`.

    Args:
      retriever: what to search.
      host: address to listen on.
      port: 0 takes a free port; read it from `server_port`.
      k: number of passages for a request that does not give one.

    Raises UserError if the address is not available.
    """

    # http.server makes a handler per connection from a class, so the retriever is an attribute of a new class.
    class Service(_Service):
        pass

    Service.retriever, Service.batched, Service.k = retriever, BatchedSearches(retriever), k
    try:
        return ThreadingHTTPServer((host, port), Service)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot serve on {host}:{port} ({error}); give another --host or --port") from error


class _Service(BaseHTTPRequestHandler):
    retriever: Retriever
    batched: BatchedSearches
    k: int
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self) -> None:
        """Answer a search request."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            # The body was not read, so the connection cannot be used again.
            self.close_connection = True
            self._reply(
                413 if length.isdigit() else 411,
                {"detail": f"at most {MAX_BODY_BYTES} bytes, with a Content-Length"},
            )
            return
        try:
            self._reply(
                200,
                handle_request(
                    self.path, json.loads(self.rfile.read(int(length))), self.k, self.batched.search
                ),
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
        """Answer a request for health or statistics."""
        if self.path == "/health":
            self._reply(200, {"status": "healthy", "retrievers": {"total": 1, "available": 1}})
        elif self.path == "/stats":
            self._reply(200, dataclasses.asdict(self.retriever.stats))
        else:
            self._reply(404, {"detail": "GET /health or /stats"})

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing for single requests; /stats counts them."""

    def _reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
