"""What a policy folder says of its recipe, and what is said of one that is not there."""

import pathlib

import pytest

from rrl.errors import UserError
from rrl.recipes.card import require_policy


@pytest.mark.parametrize("recipe", ["r3rag", "r2ag", "tiresrag", "r1_searcher", "research", "search_r1"])
def test_a_cold_start_that_is_not_there_yet_is_told_how_to_make(
    recipe: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a checkout may have it
    with pytest.raises(
        UserError,
        match=rf"sft\.py .*:recipe={recipe},init=assets/miniwiki-policy --workdir=runs/{recipe}_cold_start, or give policy=",
    ):
        require_policy(f"runs/{recipe}_cold_start/model")


def test_another_folder_is_no_cold_start() -> None:
    with pytest.raises(
        UserError, match=r"^model='runs/r3rag_cold_start/model' does not exist yet.* or give model=FOLDER"
    ):
        require_policy("runs/r3rag_cold_start/model", "model")
    for folder in ("runs/other_cold_start/model", "/none", ""):
        with pytest.raises(UserError, match=r"is no Hugging Face folder"):
            require_policy(folder)
