"""Building an index: a killed build continues to the same bytes, and errors name the cause."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rrl.data.passages import Passage
from rrl.errors import UserError
from rrl.retrieval.build import build_index
from rrl.retrieval.build_state import BuildOptions
from rrl.retrieval.folder import KINDS, index_identity
from rrl.retrieval.index import open_index
from tests.retrieval.fakes import WordEncoder

PASSAGES = [Passage(f"p{i}", f"Name {i}", f"fact {i * i} of {chr(97 + i % 26)}") for i in range(100)]

KILLED = """
import os, signal, sys
from rrl.retrieval.index import open_index
from rrl.retrieval.build import build_index
from rrl.retrieval.build_state import BuildOptions
from tests.retrieval.fakes import WordEncoder

def killed(stage, done, total):
    if stage in ("embed", "count words") and done >= 0.6 * total:
        os.kill(os.getpid(), signal.SIGKILL)

kind = sys.argv[3]
encoder = None if kind == "bm25" else WordEncoder()
build_index(sys.argv[1], sys.argv[2], kind, encoder, options=BuildOptions(block=10), progress=killed)
"""


def corpus(folder: Path) -> Path:
    file = folder / "corpus.jsonl"
    file.write_text("".join(json.dumps(dataclasses.asdict(passage)) + "\n" for passage in PASSAGES))
    return file


def encoder_for(kind: str):
    return None if kind == "bm25" else WordEncoder()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name != "manifest.json"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_build_killed_at_60_percent_continues_to_the_same_index(tmp_path: Path, kind: str) -> None:
    file, out = corpus(tmp_path), tmp_path / "index"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(file), str(out), kind], cwd=Path(__file__).parents[2]
    )
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    progress_calls: list[tuple[str, int]] = []
    build_index(
        file,
        out,
        kind,
        encoder_for(kind),
        options=BuildOptions(block=10),
        progress=lambda stage, done, _: progress_calls.append((stage, done)),
    )
    assert progress_calls[0] == ("count words" if kind == "bm25" else "embed", 60)
    build_index(PASSAGES, tmp_path / "whole", kind, encoder_for(kind), options=BuildOptions(block=10))
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("after", [0.0, 60.0])
def test_a_build_killed_within_a_block_keeps_the_embeddings_it_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: float
) -> None:
    monkeypatch.setattr("rrl.retrieval.build_embeddings.SAVE_SECONDS", after)
    embedded: list[str] = []

    class Counting(WordEncoder):
        def embed_tokens(self, texts, **options):
            embedded.extend(texts)
            return super().embed_tokens(texts, **options)

    def killed(stage: str, done: int, total: int) -> None:
        if stage == "embed" and done >= 60:
            raise KeyboardInterrupt

    out = tmp_path / "index"
    with pytest.raises(KeyboardInterrupt):
        build_index(corpus(tmp_path), out, "exact", WordEncoder(), progress=killed)  # type: ignore[arg-type]
    build_index(corpus(tmp_path), out, "exact", Counting(), progress=lambda *_: None)  # type: ignore[arg-type]
    assert len(embedded) == (44 if after == 0.0 else 100)  # 14 batches of 4 were saved
    build_index(corpus(tmp_path), tmp_path / "whole", "exact", WordEncoder())  # type: ignore[arg-type]
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("damage", [b"", b"PK nonsense", None])
def test_a_damaged_partial_block_of_a_killed_build_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes | None
) -> None:
    monkeypatch.setattr("rrl.retrieval.build_embeddings.SAVE_SECONDS", 0.0)
    out, partial = tmp_path / "index", tmp_path / "index.unfinished" / "begun.npz"

    def killed(stage: str, done: int, total: int) -> None:
        if stage == "embed" and done >= 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(corpus(tmp_path), out, "exact", WordEncoder(), progress=killed)  # type: ignore[arg-type]
    if damage is None:
        np.savez(partial, start=0, rows=np.arange(3), vectors=np.zeros((3, 1), np.float32))
    else:
        partial.write_bytes(damage)
    build_index(corpus(tmp_path), out, "exact", WordEncoder())  # type: ignore[arg-type]
    build_index(corpus(tmp_path), tmp_path / "whole", "exact", WordEncoder())  # type: ignore[arg-type]
    assert contents(out) == contents(tmp_path / "whole")


def test_a_changed_corpus_is_embedded_again(tmp_path: Path) -> None:
    class Failing(WordEncoder):
        def embed_tokens(self, texts, **options):
            if "Name 50" in " ".join(texts):
                raise RuntimeError
            return super().embed_tokens(texts, **options)

    file, out = corpus(tmp_path), tmp_path / "index"
    with pytest.raises(RuntimeError):
        build_index(file, out, "exact", Failing(), options=BuildOptions(block=10))  # type: ignore[arg-type]
    file.write_text(file.read_text().replace('Name 3"', 'Other 3"'))
    build_index(file, out, "exact", WordEncoder(), options=BuildOptions(block=10))  # type: ignore[arg-type]
    build_index(open_index(out, WordEncoder()).passages, tmp_path / "whole", "exact", WordEncoder())  # type: ignore[arg-type]
    assert contents(out) == contents(tmp_path / "whole")


def test_saved_embeddings_of_a_partial_block_are_not_reused_for_another_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrl.retrieval.build_embeddings.SAVE_SECONDS", 0.0)

    def killed(stage: str, done: int, total: int) -> None:
        if stage == "embed" and done >= 60:
            raise KeyboardInterrupt

    file, out = corpus(tmp_path), tmp_path / "index"
    with pytest.raises(KeyboardInterrupt):
        build_index(file, out, "exact", WordEncoder(), progress=killed)  # type: ignore[arg-type]
    file.write_text(file.read_text().replace("Name ", "Other "))
    build_index(file, out, "exact", WordEncoder())  # type: ignore[arg-type]
    build_index(file, tmp_path / "whole", "exact", WordEncoder())  # type: ignore[arg-type]
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("kind", KINDS)
def test_a_build_killed_while_it_finishes_repeats_no_work(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self, target):
        raise KeyboardInterrupt

    file, out = corpus(tmp_path), tmp_path / "index"
    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        build_index(file, out, kind, encoder_for(kind))
    monkeypatch.undo()
    if kind != "bm25":
        monkeypatch.setattr(WordEncoder, "embed_tokens", None)
    build_index(file, out, kind, encoder_for(kind))
    monkeypatch.undo()
    build_index(PASSAGES, tmp_path / "whole", kind, encoder_for(kind))
    assert contents(out) == contents(tmp_path / "whole")
    files = [
        json.loads((folder / "manifest.json").read_text())["files"] for folder in (out, tmp_path / "whole")
    ]
    assert files[0] == files[1] and files[0].keys() == contents(out).keys()


def test_a_second_build_of_the_same_folder_is_rejected(tmp_path: Path) -> None:
    def again(stage: str, done: int, total: int) -> None:
        with pytest.raises(UserError, match=r"index\.unfinished: another process is building it"):
            build_index(PASSAGES, tmp_path / "index", "exact", WordEncoder())  # type: ignore[arg-type]

    build_index(PASSAGES, tmp_path / "index", "exact", WordEncoder(), progress=again)  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path)) == ["index"] and "lock" not in os.listdir(tmp_path / "index")


def test_embeddings_without_a_known_corpus_are_discarded(tmp_path: Path) -> None:
    work = tmp_path / "index.unfinished"
    work.mkdir()
    np.save(work / "embeddings.npy", np.zeros((100, 32), np.float32))
    (work / "cut.txt").write_text("0\n")
    build_index(PASSAGES, tmp_path / "index", "exact", WordEncoder())  # type: ignore[arg-type]
    assert np.load(tmp_path / "index/embeddings.npy").any()


def test_an_unfinished_build_with_other_settings_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "index.unfinished").mkdir()
    (tmp_path / "index.unfinished/wanted.json").write_text(
        '{"kind": "exact", "block": 8192, "shard": [0, 1]}'
    )
    with pytest.raises(
        UserError, match=r"unfinished build with other settings \(.*kind: exact there, bm25 now"
    ):
        build_index(PASSAGES, tmp_path / "index", "bm25")


@pytest.mark.parametrize("content", [b"\xff{}", b"{", b"[1]"])
@pytest.mark.parametrize("name", ["wanted.json", "corpus.json"])
def test_the_error_names_a_damaged_file_of_an_unfinished_build(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / "index.unfinished").mkdir()
    (tmp_path / "index.unfinished" / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"index\.unfinished: damaged, {name} cannot be read .*build again"):
        build_index(PASSAGES, tmp_path / "index", "bm25")


def test_the_error_names_a_cut_txt_with_a_line_that_is_not_a_number(tmp_path: Path) -> None:
    file, out = corpus(tmp_path), tmp_path / "index"

    def killed(stage: str, done: int, total: int) -> None:
        if stage == "embed" and done >= 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(file, out, "exact", WordEncoder(), options=BuildOptions(block=10), progress=killed)  # type: ignore[arg-type]
    cuts = tmp_path / "index.unfinished" / "cut.txt"
    cuts.write_bytes(b"\xff" + cuts.read_bytes()[1:])
    with pytest.raises(UserError, match=r"index\.unfinished: damaged, cut\.txt .*build again"):
        build_index(file, out, "exact", WordEncoder(), options=BuildOptions(block=10))  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "last"), [("exact", "embed"), ("exact", "read"), ("bm25", "count words")])
def test_the_error_names_a_folder_that_is_deleted_during_the_build(
    tmp_path: Path, kind: str, last: str
) -> None:
    def deleted(stage: str, done: int, total: int) -> None:
        if stage == last:
            shutil.rmtree(tmp_path / "index.unfinished", ignore_errors=True)

    many = [dataclasses.replace(passage, id=f"{i}") for i in range(10) for passage in PASSAGES]
    with pytest.raises(
        UserError, match=r"index\.unfinished: the folder was deleted or renamed during the build"
    ):
        build_index(many, tmp_path / "index", kind, encoder_for(kind), progress=deleted)


FULL = """
import resource, sys
from rrl.errors import UserError
from rrl.retrieval.index import open_index
from rrl.retrieval.build import build_index
from rrl.retrieval.build_state import BuildOptions
from tests.retrieval.fakes import WordEncoder
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), -1))
try:
    build_index(sys.argv[1], sys.argv[2], "exact", WordEncoder(), options=BuildOptions(block=10))
except UserError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("limit", [1000, 10_000])
def test_a_full_disk_raises_an_error_and_the_build_can_be_continued(tmp_path: Path, limit: int) -> None:
    # A limit on file size stands in for a full disk: it stops the writing of passages, or of embeddings.
    file, out = corpus(tmp_path), tmp_path / "index"
    full = subprocess.run(
        [sys.executable, "-c", FULL, str(file), str(out), str(limit)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert "the disk is full" in full.stderr and "index.unfinished" in full.stderr
    assert "same command again" in full.stderr and "Traceback" not in full.stderr
    build_index(file, out, "exact", WordEncoder(), options=BuildOptions(block=10))  # type: ignore[arg-type]
    build_index(PASSAGES, tmp_path / "whole", "exact", WordEncoder(), options=BuildOptions(block=10))  # type: ignore[arg-type]
    assert contents(out) == contents(tmp_path / "whole")


FILLING = """
import subprocess, sys
from pathlib import Path
from rrl.errors import UserError
from rrl.retrieval import build_scann
from rrl.retrieval.build import build_index
from rrl.retrieval.build_state import BuildOptions
from rrl.retrieval.index import open_index
from rrl.retrieval.sizing import ScannConfig
from rrl.data.passages import Passage
from tests.retrieval.test_build import contents, encoder_for

disk, kind = Path(sys.argv[1]), sys.argv[2]
passages = [Passage(f"p{i}", f"Name {i}", f"fact {i * i} of {chr(97 + i % 26)}") for i in range(600)]
build_scann.choose_scann = lambda *_: ScannConfig(5, 5, 50, spilled=True, part=400)

def mount(options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)

def build_in(folder):
    build_index(passages, folder, kind, encoder_for(kind), options=BuildOptions(block=200))

size = 8
mount(f"size={size}k")
while True:
    try:
        build_in(disk / "index")
        break
    except UserError as error:
        assert "the disk is full" in str(error) and "same command again" in str(error)
        size += 4
        mount(f"remount,size={size}k")
mount("remount,size=8m")
build_in(disk / "whole")
index, whole = contents(disk / "index"), contents(disk / "whole")
assert index.keys() == whole.keys()
# The clusters of ScaNN's trees differ between builds.
assert (other := [name for name in whole if index[name] != whole[name] and "scann/0" not in name]) == [], other
queries = [passage.title for passage in passages]
found, expected = (
    [[hit.passage for hit in hits] for hits in open_index(disk / name, encoder_for(kind)).search(queries, 3)]
    for name in ("index", "whole")
)
assert found == expected
print(f"full {(size - 8) // 4} times")
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_full_at_any_write_raises_an_error_and_the_build_can_be_continued(
    tmp_path: Path, kind: str
) -> None:
    # A private tmpfs that grows by one page whenever it is full.
    private = ["unshare", "--user", "--map-root-user", "--mount"]
    probe = [*private, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    filled = subprocess.run(
        [*private, sys.executable, "-c", FILLING, str(tmp_path), kind],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert filled.returncode == 0, filled.stderr
    assert int(filled.stdout.split()[-2]) >= 10


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b'{"id": 1, "text": "x"}\n{"id": 1, "text": "y"}\n', "line 2: id: '1' occurs twice"),
        (b'{"id": 1, "text": "x"}\n{"id": 2, "text"\n', "line 2: not JSON"),
        (b'{"id": 1, "text": "x"}\n{"id": 2, "text": "\xff"}\n', "line 2: not UTF-8"),
    ],
)
def test_the_error_names_the_line_of_a_broken_record(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(data)
    with pytest.raises(UserError, match=message):
        build_index(file, tmp_path / "index", "bm25")
    assert not (tmp_path / "index").exists()


def test_a_continued_build_still_counts_the_records_left_out_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self, target):
        raise KeyboardInterrupt

    file = tmp_path / "corpus.jsonl"
    file.write_text('{"id": 1, "text": "x"}\nbroken\n{"id": 1, "text": "y"}\n{"id": 2, "text": "z"}\n')
    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        build_index(file, tmp_path / "index", "bm25", options=BuildOptions(on_error="skip"))
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"line 2: not JSON.*--skip_broken"):
        build_index(file, tmp_path / "index", "bm25")
    manifest = build_index(file, tmp_path / "index", "bm25", options=BuildOptions(on_error="skip"))
    assert (manifest["passages"], manifest["skipped"]) == (2, 2)


def test_other_columns_make_a_continued_build_read_the_corpus_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self, target):
        raise KeyboardInterrupt

    file = tmp_path / "corpus.tsv"
    file.write_text("1\tA long title\tshort text\n2\t\t\n")
    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        build_index(file, tmp_path / "index", "bm25", options=BuildOptions(columns=["id", "text", "title"]))
    monkeypatch.undo()
    manifest = build_index(
        file, tmp_path / "index", "bm25", options=BuildOptions(columns=["id", "title", "text"])
    )
    assert (manifest["passages"], manifest["left_out"]) == (1, 1)
    index = open_index(tmp_path / "index")
    assert index.search(["title"], 1)[0][0].passage == Passage("1", "A long title", "short text")


def test_the_manifest_counts_cut_passages(tmp_path: Path) -> None:
    long = [Passage("long", "Long", "word " * 60), *PASSAGES, Passage("longer", "Longer", "word " * 70)]
    manifest = build_index(long, tmp_path / "index", "exact", WordEncoder(), options=BuildOptions(block=10))  # type: ignore[arg-type]
    assert manifest["cut"] == 2


def test_opening_and_searching_reads_only_the_returned_passages(tmp_path: Path) -> None:
    build_index(PASSAGES, tmp_path / "index", "bm25")
    retriever = open_index(tmp_path / "index")
    read: list[int] = []
    pread = os.pread
    os.pread = lambda file, size, at: read.append(at) or pread(file, size, at)  # type: ignore[assignment,func-returns-value]
    try:
        (hits,) = retriever.search(["Name 3"], 2)
    finally:
        os.pread = pread
    assert len(read) == 2 == len(hits)


def test_shards_share_the_corpus(tmp_path: Path) -> None:
    ids: list[str] = []
    for part in range(3):
        build_index(PASSAGES, tmp_path / str(part), "bm25", options=BuildOptions(shard=(part, 3)))
        ids += [passage.id for passage in open_index(tmp_path / str(part)).passages]
    assert sorted(ids) == sorted(passage.id for passage in PASSAGES)
    with pytest.raises(UserError, match="no passages for shard 100/101"):
        build_index(PASSAGES, tmp_path / "more", "bm25", options=BuildOptions(shard=(100, 101)))
    with pytest.raises(UserError, match="shard=3/3 must be"):
        build_index(PASSAGES, tmp_path / "more", "bm25", options=BuildOptions(shard=(3, 3)))


@pytest.mark.parametrize("kind", ["scann", "exact"])
def test_an_index_without_titles_has_another_identity(tmp_path: Path, kind: str) -> None:
    alone = dataclasses.replace(WordEncoder(), titles=False)
    whole = build_index(PASSAGES, tmp_path / "whole", kind, WordEncoder())
    texts = build_index(PASSAGES, tmp_path / "texts", kind, alone)
    assert "title_weight" not in whole and texts["title_weight"] == 0
    vectors = np.load(tmp_path / "texts" / "embeddings.npy")
    np.testing.assert_array_equal(vectors, WordEncoder().embed([passage.text for passage in PASSAGES]))
    assert len(open_index(tmp_path / "texts", WordEncoder()).search(["fact 81"], 3)[0]) == 3
    identities = [index_identity(tmp_path / name) for name in ("whole", "texts")]
    assert identities[1] == identities[0] | {"title_weight": 0}


def test_an_unfinished_build_with_titles_cannot_be_continued_without_them(tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if stage == "embed":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(PASSAGES, tmp_path / "index", "exact", WordEncoder(), progress=stop)
    with pytest.raises(UserError, match="title_weight: None there, 0 now"):
        build_index(PASSAGES, tmp_path / "index", "exact", dataclasses.replace(WordEncoder(), titles=False))
