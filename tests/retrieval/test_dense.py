"""Exact search and ScaNN: hand-checkable rankings, k beyond the corpus, recall on clustered vectors."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rrl.retrieval.dense import ExactIndex, ScannIndex
from rrl.retrieval.ranking import NO_PASSAGE, ranking_recall
from rrl.retrieval.sizing import ScannConfig

BUILDERS = [ExactIndex, ScannIndex.build]
CORNERS = np.float32([[1, 0, 0], [0, 1, 0], [0.6, 0.8, 0], [1, 0, 0], [0, 0, 1]])


def clustered(count: int, query_count: int, dim: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors around 100 centres, and queries near some of them."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(100, dim))[rng.integers(0, 100, count)] + 0.4 * rng.normal(size=(count, dim))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    queries = points[rng.integers(0, count, query_count)] + 0.05 * rng.normal(size=(query_count, dim))
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    return points.astype(np.float32), queries.astype(np.float32)


@pytest.mark.parametrize("build", BUILDERS)
def test_passages_are_ranked_by_inner_product(build) -> None:
    ids, scores = build(CORNERS).search(["", ""], 3, np.float32([[1, 0, 0], [0, 1, 0]]))
    assert ids.tolist() == [[0, 3, 2], [1, 2, 0]]
    np.testing.assert_allclose(scores, [[1, 1, 0.6], [1, 0.8, 0]], atol=1e-7)


@pytest.mark.parametrize("build", BUILDERS)
def test_k_beyond_the_corpus_returns_the_whole_corpus_and_padding(build) -> None:
    ids, scores = build(CORNERS).search([""], 7, np.float32([[0, 0, 1]]))
    assert ids.tolist() == [[4, 0, 1, 2, 3, NO_PASSAGE, NO_PASSAGE]]
    assert np.isneginf(scores[0, 5:]).all()


@pytest.mark.parametrize("build", BUILDERS)
def test_a_corpus_of_one_passage_can_be_searched(build) -> None:
    assert build(CORNERS[:1]).search([""], 2, CORNERS[:1])[0].tolist() == [[0, NO_PASSAGE]]


def test_exact_search_agrees_with_a_full_sort_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrl.retrieval.dense.CHUNK", 64)
    points, queries = clustered(300, 20)
    expected = np.argsort(-(queries.astype(np.float64) @ points.T.astype(np.float64)), axis=1, kind="stable")[
        :, :5
    ]
    np.testing.assert_array_equal(ExactIndex(points).search([""] * 20, 5, queries)[0], expected)


@pytest.mark.parity
def test_exact_search_equals_faiss() -> None:
    faiss = pytest.importorskip("faiss", reason="faiss is not installed; parity needs the extra [parity]")
    points, queries = clustered(3_000, 50, dim=24)
    index = faiss.IndexFlatIP(24)
    index.add(points)
    expected, order = index.search(queries, 10)
    ids, scores = ExactIndex(points).search([""] * 50, 10, queries)
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(scores, expected, atol=1e-6)


@pytest.mark.parametrize("count", [2_000, 25_000])
def test_scann_has_high_recall_against_exact_search(count: int) -> None:
    points, queries = clustered(count, 100)
    exact, _ = ExactIndex(points).search([""] * 100, 5, queries)
    found, _ = ScannIndex.build(points).search([""] * 100, 5, queries)
    recall = np.mean([len(set(a) & set(b)) / 5 for a, b in zip(exact.tolist(), found.tolist())])
    assert recall == 1 if count < 20_000 else recall >= 0.99


FORMS = [
    ScannConfig(30, 30, 100),
    ScannConfig(30, 30, 100, spilled=True),
    ScannConfig(30, 30, 400, code_dims=4),
    ScannConfig(20, 20, 100, spilled=True, part=900),
]


@pytest.mark.parametrize("config", FORMS)
def test_every_scann_config_has_high_recall_in_memory_and_from_a_folder(
    tmp_path: Path, config: ScannConfig
) -> None:
    points, queries = clustered(2_000, 100)
    exact, scores = ExactIndex(points).search([""] * 100, 5, queries)
    assert list(ScannIndex.build_folder(tmp_path / "scann", points, config))[-1] == 2_000
    (tmp_path / "scann").rename(tmp_path / "moved")
    for index in (ScannIndex.build(points, config), ScannIndex.load(tmp_path / "moved", points, config)):
        ids, found = index.search([""] * 100, 5, queries)
        assert ranking_recall(ids, exact) >= 0.99
        same = ids == exact
        np.testing.assert_array_equal(found[same], scores[same])
        assert all(len(set(row)) == 5 for row in ids.tolist()), "no passage comes twice"


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells how it reads a file")
def test_random_reads_of_a_memory_map_do_not_read_neighbouring_pages(tmp_path: Path) -> None:
    points, queries = clustered(2_000, 5)
    np.save(tmp_path / "embeddings.npy", points)
    mapped = np.load(tmp_path / "embeddings.npy", mmap_mode="r")
    list(ScannIndex.build_folder(tmp_path / "scann", mapped, FORMS[0]))
    index = ScannIndex.load(tmp_path / "scann", mapped, FORMS[0])
    assert (
        ranking_recall(
            index.search([""] * 5, 5, queries)[0], ExactIndex(points).search([""] * 5, 5, queries)[0]
        )
        == 1
    )
    _, _, mapping = Path("/proc/self/smaps").read_text().partition(str(tmp_path / "embeddings.npy"))
    flags = mapping.partition("VmFlags:")[2].partition("\n")[0].split()
    assert "rr" in flags


NARROW = [ScannConfig(40, 1, 500), ScannConfig(40, 1, 500, spilled=True, part=900)]


@pytest.mark.parametrize("config", NARROW)
def test_a_leaf_with_fewer_than_k_passages_returns_no_duplicates(config: ScannConfig) -> None:
    points, _ = clustered(2_000, 1)
    ids, _ = ScannIndex.build(points, config).search([""] * 100, 5, points[:100])
    rows = [[i for i in row if i != NO_PASSAGE] for row in ids.tolist()]
    assert all(len(set(row)) == len(row) > 0 for row in rows)


@pytest.mark.parametrize("config", [*FORMS, *NARROW])
def test_k_beyond_the_corpus_returns_the_whole_corpus_for_every_scann_config(config: ScannConfig) -> None:
    points, queries = clustered(2_000, 3)
    exact, _ = ExactIndex(points).search([""] * 3, 2_100, queries)
    np.testing.assert_array_equal(ScannIndex.build(points, config).search([""] * 3, 2_100, queries)[0], exact)


def test_scann_is_imported_without_tensorflow_and_only_when_used() -> None:
    code = (
        "import sys\n"
        "import rrl.retrieval.index\n"
        "assert 'scann' not in sys.modules\n"
        "import numpy as np\n"
        "from rrl.retrieval.dense import ScannIndex\n"
        "ScannIndex.build(np.eye(3, dtype=np.float32))\n"
        "assert 'tensorflow' not in sys.modules and 'scann.scann_ops.py.scann_ops' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
