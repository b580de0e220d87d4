"""Draws and measures the retrieval trees of a finished R2AG run: `python launch/trees.py --config=configs/r2ag.py`.

Writes WORKDIR/trees.html from the run's held-out trajectories. Prints their recall beside that of single-step retrieval with as
many passages. Give the config with the arguments of the run.
"""

import pathlib
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from rrl.runs import launcher

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file of the run, with its arguments after a colon.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run (default: runs/ and the config's `name`).")
_SHOWN = flags.DEFINE_integer("shown", 60, "Number of trees on the page.", lower_bound=1)
flags.register_validator("workdir", lambda folder: folder != "", message="--workdir must name a folder")
flags.mark_flags_as_required(["config"])


def main(_: Sequence[str]) -> None:
    """Draw the trees and print their recall."""
    from rrl.data.trajectory_files import load_trajectories
    from rrl.errors import UserError
    from rrl.eval.single_step import as_text, compare_single_step
    from rrl.recipes.r2ag import R2AG
    from rrl.report.trees_html import write_trees
    from rrl.runs.datasets import load_datasets
    from rrl.setup.settings import TrainSettings

    settings = TrainSettings.parse(_CONFIG.value)
    if not isinstance(settings.recipe, R2AG):
        raise UserError(
            f"--config uses the recipe {type(settings.recipe).__name__}, which has no trees; give configs/r2ag.py"
        )
    workdir = pathlib.Path(_WORKDIR.value or f"runs/{settings.name}")
    file = workdir / "trajectories.jsonl"
    if not file.is_file():
        raise UserError(
            f"{file} does not exist; run python launch/train.py with this config first, or give its --workdir"
        )
    trajectories = load_trajectories(file)
    page = workdir / "trees.html"
    write_trees(trajectories[: _SHOWN.value], settings.recipe, page, f"{settings.name}: retrieval trees")
    print(page)
    retriever = load_datasets(settings.data, settings.retriever, workdir=workdir)[1].retriever
    if retriever is None:
        print("retriever.kind=off: no single-step retrieval to compare with")
    else:
        print(as_text(compare_single_step(trajectories, retriever)))


if __name__ == "__main__":
    launcher.run(main)
