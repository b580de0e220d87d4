"""Arms of one experiment over seeds, each a run of its own: GRPO against its controls, as curves and a table.

Every run is a subprocess with its own workdir, so that a broken-off sweep continues where it was.
"""

import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from rrl.errors import UserError
from rrl.eval.curves import plot_spread
from rrl.eval.summary import table
from rrl.train.metrics import read_metrics

ARMS = {
    "GRPO": "",
    "rewards permuted": "control=permuted",
    "search off": "control=search_off",
    "SFT continued": "control=sft",
}
"""Config argument of each arm."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run."""

    arm: str
    seed: int
    workdir: pathlib.Path

    @property
    def metrics(self) -> pathlib.Path:
        return self.workdir / "metrics.jsonl"


def cells(root: pathlib.Path, arms: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """All runs, seed by seed, so that a sweep that is broken off has compared the arms."""
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        raise UserError(f"arms={unknown} are unknown; there are {', '.join(ARMS)}")
    return [Cell(arm, seed, root / f"{arm.replace(' ', '_')}-{seed}") for seed in seeds for arm in arms]


def compare(config: str, root: str | pathlib.Path, arms: Sequence[str], seeds: Sequence[int]) -> str:
    """Runs what is missing and returns the table; `root` gets compare.png, compare.txt and a folder a run.

    `config` is a config file with arguments, without seed and control.
    """
    root = pathlib.Path(root)
    plan = cells(root, arms, seeds)
    file, _, arguments = config.partition(":")
    for cell in plan:
        if (cell.workdir / "summary.txt").exists():
            continue
        given = ",".join(filter(None, [arguments, f"seed={cell.seed}", ARMS[cell.arm]]))
        command = [sys.executable, "launch/train.py", f"--config={file}:{given}", f"--workdir={cell.workdir}"]
        print(" ".join(command[1:]), file=sys.stderr, flush=True)
        subprocess.run(command, check=True)
    runs = {arm: [c.metrics for c in plan if c.arm == arm] for arm in arms}
    panels = {"eval/em": "held-out exact match", "eval/f1": "held-out F1"}
    plot_spread(runs, root / "compare.png", panels, x="minutes", title=f"{config}: arms over seeds")
    text = "\n".join(rows(plan, arms))
    (root / "compare.txt").write_text(text + "\n", encoding="utf-8")
    return text


def rows(plan: Sequence[Cell], arms: Sequence[str]) -> list[str]:
    """Held-out exact match before and after, by arm: mean over seeds, and each seed's gain, in points."""
    lines: list[tuple[str, ...]] = [("", "EM before", "EM after", "gain", "by seed", "minutes of training")]
    for arm in arms:
        ends = [_ends(cell) for cell in plan if cell.arm == arm]
        before, after, minutes = (np.array(column) for column in zip(*ends, strict=True))
        gains = 100 * (after - before)
        lines.append(
            (
                arm,
                f"{100 * before.mean():.1f}",
                f"{100 * after.mean():.1f}",
                f"{gains.mean():+.1f}",
                " ".join(f"{gain:+.1f}" for gain in gains),
                f"{minutes.mean():.1f}",
            )
        )
    return table(lines)


def _ends(cell: Cell) -> tuple[float, float, float]:
    found = [line for line in read_metrics(cell.metrics) if "eval/em" in line]
    if not found:
        raise UserError(f"{cell.metrics} holds no evaluation; delete {cell.workdir} and run the comparison again")
    return found[0]["eval/em"], found[-1]["eval/em"], found[-1]["minutes"]
