"""Tests of names: unique, disjoint between splits, and confusable within a call."""

import itertools

import numpy as np
import pytest

from rrl.errors import UserError
from rrl.miniwiki.names import (
    CITY_END,
    COMPANY_WORD_END,
    PATTERNS,
    SPLITS,
    SURNAME_END,
    WORD_MIDDLE,
    WORD_START,
    draw_names,
    permute,
)


@pytest.mark.parametrize("size", [1, 2, 7, 1000, 4097])
def test_permute_is_a_permutation_that_depends_on_its_key(size: int) -> None:
    permuted = permute(np.arange(size), size, key=3)
    assert sorted(permuted) == list(range(size))
    if size > 100:
        assert not np.array_equal(permuted, permute(np.arange(size), size, key=4))
        assert abs(np.corrcoef(np.arange(size), permuted)[0, 1]) < 0.15


@pytest.mark.parametrize("end", [SURNAME_END, CITY_END, COMPANY_WORD_END])
def test_different_parts_never_make_the_same_name(end: tuple[str, ...]) -> None:
    # Otherwise two different numbers, even of different splits, could give the same name.
    assert not [pair for pair in itertools.permutations(WORD_START, 2) if pair[1].startswith(pair[0])]
    endings = [*end, *(a + b for a in WORD_MIDDLE for b in end)]
    assert len(set(endings)) == len(endings)


@pytest.mark.parametrize("family", PATTERNS)
def test_names_are_unique_and_splits_disjoint(family: str) -> None:
    drawn = {split: draw_names(family, 20_000, split, seed=1) for split in SPLITS}
    for split in SPLITS:
        assert len(set(drawn[split])) == 20_000
    for a, b in itertools.combinations(SPLITS, 2):
        assert not set(drawn[a]) & set(drawn[b])


def test_splits_stay_disjoint_over_seeds() -> None:
    train = {name for seed in range(20) for name in draw_names("work", 500, "train", seed)}
    test = {name for seed in range(20) for name in draw_names("work", 500, "test", seed)}
    assert not train & test


def test_held_out_names_consist_of_words_of_the_training_split() -> None:
    words = {word for name in draw_names("work", 3000, "train", 0) for word in name.split()}
    assert {word for name in draw_names("work", 3000, "test", 0) for word in name.split()} <= words


def test_some_names_are_followed_by_their_namesake() -> None:
    names = draw_names("person", 600, "dev", 0)
    shared = [a.split()[1] == b.split()[1] for a, b in itertools.pairwise(names)]
    assert 0.1 < np.mean(shared) < 0.25


def test_drawing_more_names_than_exist_is_refused() -> None:
    with pytest.raises(UserError, match="fewer passages"):
        draw_names("city", 2_000_000, "dev", 0)
