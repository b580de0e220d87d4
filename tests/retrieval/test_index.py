"""Index folders: a written folder gives the same hits, can be moved, and is rejected if it is damaged or does not match."""

import json
import logging
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rrl.data.passages import Passage
from rrl.errors import UserError
from rrl.retrieval.build import build_index
from rrl.retrieval.folder import KINDS, PassageFile
from rrl.retrieval.index import make_retriever, open_index, stored_retriever
from rrl.retrieval.retriever import Retriever
from rrl.retrieval.sizing import BRUTE_FORCE_BELOW, ScannConfig
from tests.retrieval.fakes import WordEncoder

CORPUS = [Passage(f"p{i}", f"Name {i}", f"fact {i * i} of {chr(97 + i % 26)} Ærø\n\ud800") for i in range(60)]
QUERIES = ["Name 3", "fact 49", "of c"]


def encoder_for(kind: str, **changes: str):
    return None if kind == "bm25" else WordEncoder(**changes)


def found(retriever: Retriever) -> list:
    return retriever.search(QUERIES, 4, retriever.embed(QUERIES) if retriever.needs_embeddings else None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_folder_returns_the_hits_of_the_index_in_memory(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_index(CORPUS, tmp_path / "index", kind, encoder_for(kind))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "index").rename(tmp_path / "elsewhere" / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    retriever = open_index("moved", encoder_for(kind))
    assert found(retriever) == found(make_retriever(CORPUS, kind, encoder_for(kind)))
    assert list(retriever.passages) == CORPUS
    assert retriever.passages[-1] == CORPUS[-1]
    assert retriever.passages[2:4] == CORPUS[2:4]
    with pytest.raises(IndexError):
        retriever.passages[60]


def test_a_folder_with_a_scann_tree_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrl.retrieval.build_scann.choose_scann", lambda *_: ScannConfig(5, 5, 50))
    build_index(CORPUS, tmp_path / "index", "scann", WordEncoder())  # type: ignore[arg-type]
    assert str(tmp_path).encode() not in b"".join(
        file.read_bytes() for file in (tmp_path / "index").rglob("*") if file.is_file()
    )
    (tmp_path / "index").rename(tmp_path / "moved")
    assert found(open_index(tmp_path / "moved", WordEncoder())) == found(  # type: ignore[arg-type]
        make_retriever(CORPUS, "exact", WordEncoder())  # type: ignore[arg-type]
    )


def test_the_manifest_describes_the_index(tmp_path: Path) -> None:
    build_index(CORPUS, tmp_path / "index", "exact", WordEncoder())  # type: ignore[arg-type]
    manifest = json.loads((tmp_path / "index/manifest.json").read_text())
    assert (manifest["kind"], manifest["passages"], manifest["dim"]) == ("exact", 60, 32)
    assert manifest["metric"] == "inner_product"
    assert manifest["encoder"]["name"] == "words"
    assert len(manifest["corpus"]) == 64
    assert set(manifest["versions"]) == {"numpy", "bm25s", "scann"}


@pytest.mark.parametrize("kind", ["scann", "exact"])
def test_the_error_names_another_encoder(tmp_path: Path, kind: str) -> None:
    build_index(CORPUS, tmp_path / "index", kind, encoder_for(kind))
    with pytest.raises(
        UserError, match=r"built with the encoder 'words' \(ffffffffffff\), got 'e5' \(eeeeeeeeeeee\)"
    ):
        open_index(tmp_path / "index", encoder_for(kind, name="e5", fingerprint="e" * 64))
    with pytest.raises(UserError, match="needs the encoder it was built with, 'words'"):
        open_index(tmp_path / "index")


def test_an_encoder_for_a_bm25_index_is_rejected(tmp_path: Path) -> None:
    build_index(CORPUS, tmp_path / "index", "bm25")
    with pytest.raises(
        UserError, match=r"index: a bm25 index searches words and takes no encoder; got 'words'"
    ):
        open_index(tmp_path / "index", WordEncoder())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_names_each_damaged_file(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "index"
    build_index(CORPUS, folder, kind, encoder_for(kind))
    for file in [file for file in folder.rglob("*") if file.is_file() and file.name != "manifest.json"]:
        data = file.read_bytes()
        for broken in (data[:-1], bytes([data[0] ^ 1]) + data[1:]):
            file.write_bytes(broken)
            with pytest.raises(UserError, match=f"damaged, .*{file.name}"):
                open_index(folder, encoder_for(kind))
        file.unlink()
        with pytest.raises(UserError, match=f"{file.name} is missing"):
            open_index(folder, encoder_for(kind))
        file.write_bytes(data)
    open_index(folder, encoder_for(kind))
    (folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"damaged, manifest.json"):
        open_index(folder, encoder_for(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_names_a_large_file_that_is_partly_overwritten(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrl.retrieval.folder.HASHED_BYTES", 1024)
    monkeypatch.setattr("rrl.retrieval.folder.SAMPLE_BYTES", 16)
    folder = tmp_path / "index"
    build_index(CORPUS, folder, kind, encoder_for(kind))
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "manifest.json"]
    large = [file for file in files if file.stat().st_size > 1024]
    assert large
    for file in large:
        data = file.read_bytes()
        for start, stop in ((0, 1), (len(data) // 2, len(data)), (len(data) // 3, len(data) // 2)):
            file.write_bytes(data[:start] + b"\xaa" * (stop - start) + data[stop:])
            with pytest.raises(UserError, match=f"damaged, .*{file.name} is not the file that was written"):
                open_index(folder, encoder_for(kind))
        file.write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    for file in large:
        del manifest["files"][str(file.relative_to(folder))]["sha256"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    open_index(folder, encoder_for(kind))


def test_an_unfinished_or_existing_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no manifest\.json"):
        open_index(tmp_path)
    with pytest.raises(UserError, match="exists"):
        build_index(CORPUS, tmp_path, "bm25")


def test_a_failed_build_leaves_no_index(tmp_path: Path) -> None:
    class Failing(WordEncoder):
        def embed_tokens(self, texts, **_):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        build_index(CORPUS, tmp_path / "index", "exact", Failing())  # type: ignore[arg-type]
    assert not (tmp_path / "index").exists()
    build_index(CORPUS, tmp_path / "index", "exact", WordEncoder())  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["index"]


def test_embeddings_are_memory_mapped(tmp_path: Path) -> None:
    build_index(CORPUS, tmp_path / "index", "exact", WordEncoder())  # type: ignore[arg-type]
    index = open_index(tmp_path / "index", WordEncoder())._index  # type: ignore[arg-type]
    assert isinstance(index.embeddings, np.memmap)  # type: ignore[attr-defined]


@pytest.fixture
def a_tree_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ScaNN use a tree for the 60 passages of `CORPUS`."""
    monkeypatch.setattr("rrl.retrieval.index.BRUTE_FORCE_BELOW", 60)
    monkeypatch.setattr("rrl.retrieval.build_scann.choose_scann", lambda *_: ScannConfig(5, 1, 10))


def stored(folder: Path, kind: str = "scann", passages: list[Passage] = CORPUS, **encoder: Any) -> Retriever:
    return stored_retriever(passages, kind, WordEncoder(**encoder), folder)  # type: ignore[arg-type]


@pytest.mark.usefixtures("a_tree_for_few")
def test_a_stored_index_is_built_once_and_then_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = found(stored(tmp_path))
    monkeypatch.setattr("rrl.retrieval.index.build_index", None)
    monkeypatch.setattr(WordEncoder, "embed_tokens", None)
    assert found(stored(tmp_path)) == first


@pytest.mark.usefixtures("a_tree_for_few")
def test_another_corpus_or_encoder_has_another_stored_index(tmp_path: Path) -> None:
    other = [*CORPUS[:-1], Passage("new", "Name new", "fact 49")]
    for passages, encoder in (
        (CORPUS, {}),
        (other, {}),
        (CORPUS, {"fingerprint": "e" * 64}),
        (CORPUS, {"titles": False}),
    ):
        assert list(stored(tmp_path, "scann", passages, **encoder).passages) == passages
    assert len([folder for folder in tmp_path.iterdir() if folder.is_dir()]) == 4


@pytest.mark.usefixtures("a_tree_for_few")
def test_concurrent_processes_build_a_stored_index_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    monkeypatch.setattr(
        "rrl.retrieval.index.build_index", lambda *given: (built.append(given), build_index(*given))
    )
    with ThreadPoolExecutor(4) as pool:  # flock works between open files, so threads stand in for processes
        results = list(pool.map(lambda _: found(stored(tmp_path)), range(4)))
    assert len(built) == 1 and results == [results[0]] * 4


@pytest.mark.usefixtures("a_tree_for_few")
def test_a_damaged_stored_index_is_rebuilt_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = stored(tmp_path, "exact")
    (file,) = tmp_path.glob("*/embeddings.npy")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with caplog.at_level(logging.WARNING):
        again = stored(tmp_path, "exact")
    assert (
        "embeddings.npy is not the file that was written. Build it again. It is built again;" in caplog.text
    )
    assert found(again) == found(first)


@pytest.mark.usefixtures("a_tree_for_few")
def test_a_resumed_run_without_its_stored_index_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        stored(tmp_path / "indexes", "exact")
        assert not caplog.messages
        shutil.rmtree(tmp_path / "indexes")
        (tmp_path / "checkpoints" / "3").mkdir(parents=True)
        stored(tmp_path / "indexes", "exact")
    assert "is missing: it was removed, or an older version of rrl named it differently" in caplog.text


def _as_file(index: Path) -> None:
    shutil.rmtree(index)
    index.write_text("x")


def _as_lost_link(index: Path) -> None:
    shutil.rmtree(index)
    index.symlink_to("nowhere")


def _without(field: str):
    def damage(index: Path) -> None:
        manifest = json.loads((index / "manifest.json").read_text())
        del manifest[field]
        (index / "manifest.json").write_text(json.dumps(manifest))

    return damage


def _files(value: object):
    def damage(index: Path) -> None:
        manifest = json.loads((index / "manifest.json").read_text())
        (index / "manifest.json").write_text(json.dumps(manifest | {"files": value}))
        (index / "embeddings.npy").unlink()

    return damage


@pytest.mark.usefixtures("a_tree_for_few")
@pytest.mark.parametrize(
    "damage", [_as_file, _as_lost_link, _without("passages"), _without("encoder"), _files([1]), _files({})]
)
def test_a_stored_index_is_rebuilt_whatever_replaced_it(tmp_path: Path, damage) -> None:
    first = stored(tmp_path, "exact")
    (index,) = (path for path in tmp_path.iterdir() if path.is_dir())
    damage(index)
    assert found(stored(tmp_path, "exact")) == found(first)


def test_a_deterministic_index_is_not_stored(tmp_path: Path) -> None:
    assert found(stored(tmp_path)) == found(make_retriever(CORPUS, "scann", WordEncoder()))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


class TableEncoder(WordEncoder):
    """A `WordEncoder` with vectors from a table, which is fast enough for a large corpus."""

    def embed(self, texts):
        """As `WordEncoder.embed`."""
        table = np.random.default_rng(0).normal(size=(997, self.dim)).astype(np.float32)
        rows = np.stack(
            [table[[zlib.crc32(word.encode()) % 997 for word in t.split()]].sum(0) for t in texts]
        )
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.slow
def test_a_large_stored_index_returns_the_same_hits_after_a_restart(tmp_path: Path) -> None:
    """From 20,000 passages on, ScaNN uses a tree. Of two such indexes built in memory, 219 of 500 rankings differed."""
    passages = [
        Passage(str(i), f"Name {i % 997} {i % 991}", f"fact {i % 983}") for i in range(BRUTE_FORCE_BELOW)
    ]
    queries = [f"Name {i} fact {7 * i % 983}" for i in range(500)]
    runs = []
    for _ in range(2):
        retriever = stored_retriever(passages, "scann", TableEncoder(), tmp_path)  # type: ignore[arg-type]
        runs.append(retriever.search(queries, 5, retriever.embed(queries)))
    assert len(list(tmp_path.glob("*/scann/*/"))) == 1
    assert runs[0] == runs[1]


def test_the_passage_file_is_closed_when_the_interpreter_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_index(CORPUS, tmp_path / "index", "exact", WordEncoder())  # type: ignore[arg-type]
    passages = PassageFile(tmp_path / "index", len(CORPUS))
    opened = passages._descriptor
    monkeypatch.setattr("rrl.retrieval.folder.os", None)  # as at interpreter exit, when modules are cleared
    del passages
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened)
