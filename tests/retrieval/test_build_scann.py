"""Building a ScaNN index: it is tuned to its target recall, and a killed build can be continued with another memory limit."""

import json
from pathlib import Path

import pytest

from rrl.data.passages import Passage
from rrl.retrieval.build import build_index
from rrl.retrieval.build_scann import sample_queries, tune_recall
from rrl.retrieval.build_state import BuildOptions
from rrl.retrieval.dense import ScannIndex
from rrl.retrieval.index import open_index
from rrl.retrieval.sizing import ScannConfig
from tests.retrieval.fakes import WordEncoder
from tests.retrieval.test_build import PASSAGES
from tests.retrieval.test_dense import clustered


def test_tuning_searches_more_leaves_until_the_target_recall() -> None:
    points, queries = clustered(5000, 50)
    index = ScannIndex.build(points, ScannConfig(leaves=100, leaves_to_search=1, reorder=20))
    better, measured = tune_recall(index, queries)
    assert measured["recall"] >= 0.99 and measured["queries"] == 50
    assert 1 < better.config.leaves_to_search <= 100


def test_the_manifest_records_the_recall_of_scann(tmp_path: Path) -> None:
    manifest = build_index(PASSAGES, tmp_path / "index", "scann", WordEncoder())  # type: ignore[arg-type]
    assert manifest["scann"]["measured"]["recall"] == 1
    assert manifest == {
        name: value
        for name, value in json.loads((tmp_path / "index/manifest.json").read_text()).items()
        if name not in ("format", "versions", "files")
    }


def test_a_build_that_lacked_memory_can_be_continued_with_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress_calls: list[int] = []

    def killed(stage: str, done: int, total: int) -> None:
        if stage == "ScaNN" and 0 < done < total:
            raise KeyboardInterrupt

    def build(
        memory_gb: float, progress=lambda stage, done, _: stage == "ScaNN" and progress_calls.append(done)
    ):
        return build_index(
            PASSAGES,
            tmp_path / "index",
            "scann",
            WordEncoder(),  # type: ignore[arg-type]
            options=BuildOptions(memory_gb=memory_gb),
            progress=progress,
        )

    monkeypatch.setattr(
        "rrl.retrieval.build_scann.choose_scann", lambda _, __, gb: ScannConfig(5, 5, 50, part=int(gb))
    )
    for memory_gb in (60, 50):
        with pytest.raises(KeyboardInterrupt):
            build(memory_gb, killed)
    assert build(50)["scann"]["part"] == 50
    assert progress_calls == [0, 50, 100]
    assert len(open_index(tmp_path / "index", WordEncoder()).search(["Name 3"], 100)[0]) == 100  # type: ignore[arg-type]


def test_sample_queries_are_titles_or_first_words() -> None:
    passages = [Passage("0", "", "one two " * 20), Passage("1", "Title", "text")]
    assert sorted(sample_queries(passages)) == sorted(["Title", " ".join(["one two"] * 6)])  # type: ignore[arg-type]
