"""Postings: counts and scores equal those of bm25s for any blocks, and counting continues after a kill."""

from pathlib import Path

import bm25s
import numpy as np
import pytest

from rrl.data.passages import Passage
from rrl.retrieval.bm25 import Bm25Config, Bm25Index
from rrl.retrieval.postings import PostingsFolder, Vocabulary, count_words

RNG = np.random.default_rng(0)
TEXTS = [" ".join(f"w{i}" for i in RNG.zipf(1.3, RNG.integers(0, 30)) if i < 200) for _ in range(300)]
PASSAGES = [Passage(str(i), "", text) for i, text in enumerate(TEXTS)]
CONFIG = Bm25Config(1.2, 0.75, stem=False)


def in_blocks(folder: Path, *cuts: int) -> PostingsFolder:
    for start, stop in zip((0, *cuts), (*cuts, len(PASSAGES))):
        # Open the folder again each time, as after a kill.
        PostingsFolder(folder).add([CONFIG.analyse_passage(passage) for passage in PASSAGES[start:stop]])
    return PostingsFolder(folder)


def test_a_block_counts_words() -> None:
    vocabulary = Vocabulary()
    block = count_words([["b", "a", "b"], [], ["a"]], vocabulary)
    assert dict(vocabulary) == {"b": 0, "a": 1}
    assert [part.tolist() for part in vars(block).values()] == [[0, 1, 1], [0, 0, 2], [2, 1, 1], [3, 0, 1]]


def test_scores_equal_those_of_bm25s() -> None:
    model = bm25s.BM25(k1=1.2, b=0.75)
    model.index([text.split() for text in TEXTS], create_empty_token=False, show_progress=False)
    ours = Bm25Index.build(PASSAGES, CONFIG)._model
    assert ours.vocab_dict.keys() == model.vocab_dict.keys()
    for word in model.vocab_dict:
        np.testing.assert_array_equal(ours.get_scores([word]), model.get_scores([word]))


@pytest.mark.parametrize("cuts", [(), (100, 101, 250)])
def test_an_index_counted_on_disk_equals_one_counted_in_memory(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    blocks = in_blocks(tmp_path / "blocks", *cuts)
    assert blocks.passages_counted == len(PASSAGES)
    Bm25Index.build_folder(blocks, tmp_path / "bm25", CONFIG)
    Bm25Index.build(PASSAGES, CONFIG).save(tmp_path / "memory")
    for file in (tmp_path / "memory").iterdir():
        assert file.read_bytes() == (tmp_path / "bm25" / file.name).read_bytes(), file.name


def test_a_half_written_block_is_counted_again(tmp_path: Path) -> None:
    blocks = in_blocks(tmp_path, 100)
    (tmp_path / "000002.npz.part").write_bytes(b"half")
    assert PostingsFolder(tmp_path).passages_counted == blocks.passages_counted
