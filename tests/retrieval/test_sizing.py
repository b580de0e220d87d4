"""ScaNN's settings fit the memory and follow the corpus size, and the documented table matches the code."""

from pathlib import Path

import pytest

from rrl.errors import UserError
from rrl.retrieval.sizing import (
    BRUTE_FORCE_BELOW,
    GB,
    ScannConfig,
    building_bytes,
    choose_scann,
    serving_bytes,
    sizing_table,
)


def test_a_small_corpus_needs_no_tree() -> None:
    assert choose_scann(BRUTE_FORCE_BELOW - 1, 768, memory_gb=0.001).leaves == 0
    assert choose_scann(BRUTE_FORCE_BELOW, 768, memory_gb=8).leaves > 0


def test_a_leaf_has_about_a_quarter_as_many_passages_as_there_are_leaves() -> None:
    config = choose_scann(1_000_000, 384, memory_gb=64)
    assert config.leaves == 2000 and config.leaves_to_search == 100


@pytest.mark.parametrize("passages", [20_000, 1_000_000, 21_000_000, 100_000_000])
@pytest.mark.parametrize("memory_gb", [4, 8, 32, 128, 512])
def test_chosen_settings_fit_the_memory_or_raise(passages: int, memory_gb: float) -> None:
    try:
        config = choose_scann(passages, 768, memory_gb)
    except UserError as error:
        refused = str(error)
    else:
        assert serving_bytes(config, passages, 768) <= memory_gb * GB
        assert building_bytes(config, passages, 768) <= memory_gb * GB
        return
    assert f"memory_gb={memory_gb} is too little for {passages} passages" in refused
    least = float(refused.split("at least ")[1].split(" ")[0])
    assert least > memory_gb
    assert choose_scann(passages, 768, 1.01 * least).leaves


def test_more_memory_is_never_less_accurate() -> None:
    chosen = [choose_scann(21_000_000, 768, memory_gb) for memory_gb in (5, 16, 64, 256, 1024)]
    assert [c.code_dims for c in chosen] == sorted((c.code_dims for c in chosen), reverse=True)
    assert chosen[-1].spilled and not chosen[0].spilled


def test_parts_cover_the_corpus_once() -> None:
    config = ScannConfig(10, 10, 10, part=300)
    assert config.parts(1000) == [(0, 300), (300, 600), (600, 900), (900, 1000)]
    assert ScannConfig(10, 10, 10).parts(1000) == [(0, 1000)]


def test_the_table_in_the_docs_matches_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs/retrieval.md").read_text(encoding="utf-8")
    assert sizing_table() in text
