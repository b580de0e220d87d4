"""Tests of the index commands: build, search and serve; wrong input ends with one line and exit code 2."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from rrl.retrieval.remote import open_remote

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]


def command(name: str, *flags: object) -> list[str]:
    return [sys.executable, f"launch/{name}.py", *map(str, flags)]


def run(name: str, *flags: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command(name, *flags), cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture
def corpus(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / "corpus.jsonl"
    lines = [{"id": f"p{i}", "contents": f'"Town {i}"\nfact {i} of {i * i}'} for i in range(40)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_an_index_is_built_searched_and_served(tmp_path: pathlib.Path, corpus: pathlib.Path) -> None:
    index = tmp_path / "index"
    built = run("build_index", f"--corpus={corpus}", f"--out={index}", "--retriever=bm25", "--bm25=lucene")
    assert built.returncode == 0, built.stderr
    assert json.loads(built.stdout)["bm25"] == {
        "k1": 1.2,
        "b": 0.75,
        "title_weight": 1,
        "stem": True,
        "tokens": "lucene",
        "idf": "lucene",
    }
    assert re.search(r"40/40 passages/s=\S+ left=0:00", built.stderr)

    found = run("search", f"--index={index}", "--k=1", "Town 7", "Town 8")
    assert found.returncode == 0, found.stderr
    assert re.findall(r"1\. .* \[(p\d+)\]", found.stdout) == ["p7", "p8"]
    assert "2 queries in 1 calls" in found.stderr
    page = tmp_path / "page.html"
    assert run("search", f"--index={index}", f"--html={page}", "Town 7").returncode == 0
    assert "<mark>Town</mark>" in page.read_text()
    nowhere = run("search", f"--index={index}", f"--html={page}/page.html", "Town 7")
    assert nowhere.returncode == 2 and "page.html: cannot be written" in nowhere.stderr

    for number in (signal.SIGINT, signal.SIGTERM):
        server = subprocess.Popen(
            command("serve_retriever", f"--index={index}", "--port=0"),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stderr is not None
            found_at = (re.search(r"http://[\d.:]+", line) for line in server.stderr)
            address = next(match[0] for match in found_at if match)
            ((hit,),) = open_remote(address).search(["Town 7"], 1)
            assert (hit.passage.id, hit.passage.title) == ("p7", "Town 7")
            server.send_signal(number)
            assert "queries in" in server.communicate(timeout=300)[1]
            assert server.returncode == 0
        finally:
            server.kill()
            server.wait()


def test_wrong_input_ends_with_one_error_line(tmp_path: pathlib.Path, corpus: pathlib.Path) -> None:
    for name, flags, message in (
        ("build_index", (f"--corpus={corpus}", f"--out={tmp_path / 'x'}"), "encoder: missing; a scann index"),
        (
            "build_index",
            (f"--corpus={tmp_path / 'no'}", f"--out={tmp_path / 'x'}", "--retriever=bm25"),
            "no: cannot",
        ),
        (
            "build_index",
            (f"--corpus={corpus}", f"--out={tmp_path / 'x'}", "--retriever=bm25", "--encoder=e5"),
            "--encoder does not apply to --retriever=bm25, only to scann and exact",
        ),
        ("build_index", (f"--corpus={corpus}", f"--out={tmp_path / 'x'}", "--k1=1"), "--k1 does not apply"),
        (
            "build_index",
            (f"--corpus={corpus}", f"--out={corpus}/x", "--retriever=bm25"),
            "corpus.jsonl/x: cannot be created",
        ),
        ("search", (f"--index={tmp_path}", "query"), "no manifest.json"),
        ("search", (f"--index={tmp_path}",), "no query"),
        (
            "search",
            ("--index=http://x", "--encoder=e5", "query"),
            "--encoder does not apply to --index=http",
        ),
        ("search", ("--index=http://127.0.0.1:9", "query"), "does not answer: "),
        ("search", (f"--index={tmp_path}", "--form=flashrag", "query"), "--form does not apply to"),
        ("serve_retriever", (f"--index={tmp_path / 'none'}",), "no manifest.json"),
    ):
        ended = run(name, *flags)
        assert ended.returncode == 2 and message in ended.stderr, ended.stderr
        assert ended.stderr.strip().count("error:") == 1 and "Traceback" not in ended.stderr
