"""A corpus on two hosts: each process serves one half, and the merged rankings equal those of one index."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rrl.data.passages import Passage
from rrl.retrieval.build import build_index
from rrl.retrieval.build_state import BuildOptions
from rrl.retrieval.index import make_retriever
from rrl.retrieval.remote import open_remote
from rrl.retrieval.retriever import RetryPolicy, SearchFailed
from tests.retrieval.fakes import WordEncoder

SERVE = """
import sys
from rrl.retrieval.index import open_index
from rrl.retrieval.serve import make_server
from tests.retrieval.fakes import WordEncoder

server = make_server(open_index(sys.argv[1], WordEncoder()), port=0)
print(server.server_port, flush=True)
server.serve_forever()
"""
RNG = np.random.default_rng(0)
PASSAGES = [
    Passage(str(i), f"Name {i}", " ".join(f"w{j}" for j in RNG.integers(0, 60, 12))) for i in range(80)
]
QUERIES = ["w1 w2 w3", "Name 7", "w59 w4", "Name 8 w1"]


def test_two_shards_together_return_the_hits_of_one_index(tmp_path: Path) -> None:
    processes, urls = [], []
    try:
        for part in range(2):
            folder = tmp_path / str(part)
            build_index(PASSAGES, folder, "exact", WordEncoder(), options=BuildOptions(shard=(part, 2)))  # type: ignore[arg-type]
            command = [sys.executable, "-c", SERVE, str(folder)]
            processes.append(
                subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
            )
        for process in processes:
            assert process.stdout is not None
            urls.append(f"http://127.0.0.1:{json.loads(process.stdout.readline())}")
        together = open_remote(",".join(urls), retry_policy=RetryPolicy(time_out=60))
        whole = make_retriever(PASSAGES, "exact", WordEncoder())  # type: ignore[arg-type]
        for k in (1, 5, 100):
            for found, expected in zip(together.search(QUERIES, k), whole.search(QUERIES, k)):
                assert [h.passage for h in found] == [h.passage for h in expected]
                np.testing.assert_allclose([h.score for h in found], [h.score for h in expected], rtol=1e-6)
        processes[1].kill()
        processes[1].wait()
        with pytest.raises(SearchFailed, match="does not answer"):
            together.search(["w9"], 1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
