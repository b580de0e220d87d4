"""An index as a search service in the forms of Search-R1 and FlashRAG's users:
`python launch/serve_retriever.py --index=FOLDER [--encoder=FOLDER] [--port=8000]`.
"""

import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from absl import flags

from rrl.runs import launcher

_INDEX = flags.DEFINE_string("index", None, "Folder that launch/build_index.py wrote.")
_ENCODER = flags.DEFINE_string("encoder", None, "Folder of the encoder it was built with.")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 is open to the network.")
_PORT = flags.DEFINE_integer("port", 8000, "Port; 0: any free one.")
_K = flags.DEFINE_integer("k", 3, "Passages for a request that does not say.")
flags.mark_flags_as_required(["index"])


def main(_: Sequence[str]) -> None:
    """Serves until Ctrl-C or SIGTERM, then says what it did."""
    from rrl.retrieval.index import open_with_encoder
    from rrl.retrieval.serve import make_server

    assert _INDEX.value is not None  # a required flag
    retriever = open_with_encoder(_INDEX.value, _ENCODER.value)
    retriever.search(["a first query, which compiles the encoder"], _K.value)
    server = make_server(retriever, _HOST.value, _PORT.value, _K.value)

    def stop(*_: Any) -> None:
        # Nothing is raised: a KeyboardInterrupt that comes while Python cleans up is printed, and forgotten.
        threading.Thread(target=server.shutdown).start()  # which waits for the loop that this interrupts

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
    launcher.run(main, callbacks=False)
