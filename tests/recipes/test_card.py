"""Error messages for missing policy folders."""

import pathlib

import pytest

from rrl.errors import UserError
from rrl.recipes.card import require_policy


@pytest.mark.parametrize("recipe", ["r3rag", "r2ag", "tiresrag", "r1_searcher", "research", "search_r1"])
def test_a_missing_cold_start_names_the_command_that_makes_it(
    recipe: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the checkout may contain the folder
    with pytest.raises(
        UserError,
        match=rf"sft\.py .*:recipe={recipe},init=assets/miniwiki-policy --workdir=runs/{recipe}_cold_start, or give policy=",
    ):
        require_policy(f"runs/{recipe}_cold_start/model")


def test_other_missing_folders_are_named_without_that_command() -> None:
    with pytest.raises(
        UserError, match=r"^model='runs/r3rag_cold_start/model' does not exist yet.* or give model=FOLDER"
    ):
        require_policy("runs/r3rag_cold_start/model", "model")
    for folder in ("runs/other_cold_start/model", "/none", ""):
        with pytest.raises(UserError, match=r"is no Hugging Face folder"):
            require_policy(folder)
