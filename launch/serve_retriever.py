"""Serves an index over http, with the protocols of Search-R1 and FlashRAG.

python launch/serve_retriever.py --index=FOLDER [--encoder=FOLDER] [--port=8000]
"""

import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from absl import flags

from rrl.runs import launcher

_INDEX = flags.DEFINE_string("index", None, "Folder that launch/build_index.py wrote.")
_ENCODER = flags.DEFINE_string("encoder", None, "Folder of the encoder that built the index.")
_HOST = flags.DEFINE_string(
    "host", "127.0.0.1", "Address to listen on; 0.0.0.0 accepts connections from the network."
)
_PORT = flags.DEFINE_integer("port", 8000, "Port; 0: any free port.")
_K = flags.DEFINE_integer("k", 3, "Passages per query if a request gives no number.")
flags.mark_flags_as_required(["index"])


def main(_: Sequence[str]) -> None:
    """Serve until Ctrl-C or SIGTERM, then print statistics."""
    from rrl.retrieval.index import open_with_encoder
    from rrl.retrieval.serve import make_server

    assert _INDEX.value is not None  # a required flag
    retriever = open_with_encoder(_INDEX.value, _ENCODER.value)
    retriever.search(["a first query, which compiles the encoder"], _K.value)
    server = make_server(retriever, _HOST.value, _PORT.value, _K.value)

    def stop(*_: Any) -> None:
        # An exception raised here would be lost if the signal arrives inside a destructor, where Python ignores exceptions.
        # shutdown() waits until serve_forever() returns, and this handler interrupts serve_forever(): hence a thread.
        threading.Thread(target=server.shutdown).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    address = f"http://{_HOST.value}:{server.server_port}"
    print(
        f"{len(retriever.passages)} passages, {retriever.kind}: {address}/retrieve",
        file=sys.stderr,
        flush=True,
    )
    server.serve_forever()
    print(retriever.stats, file=sys.stderr)


if __name__ == "__main__":
    launcher.run(main, callbacks=False)  # no rollout, hence no host callbacks
