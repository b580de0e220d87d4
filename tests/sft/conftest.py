"""A chat service that answers like the scripted expert, for the tests of cold starts."""

import contextlib
import http.server
import json
import threading

import pytest

from rrl.miniwiki import KINDS, generate, mixed_questions
from tests.sft.cold_start_runs import ScriptedService


@pytest.fixture
def service():
    """Serve a `ScriptedService` over HTTP; it has an attribute `url`."""
    found = ScriptedService(mixed_questions(generate("train", 0, 200, 1), 2, KINDS, 0))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if found.refused(body):
                self.send_error(400, "too long")
                return
            try:
                said = found.answer(body)
            except ConnectionError:
                self.close_connection = True
                return
            choice = {"message": {"content": said}, "finish_reason": "length" if found.cut(said) else "stop"}
            data = json.dumps({"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    found.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield found
    server.shutdown()
    server.server_close()
