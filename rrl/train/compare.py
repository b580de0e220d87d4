"""Arms of one experiment over seeds, each a run of its own: GRPO against its controls, as curves and a table.

Every run is a subprocess with its own workdir, so that a broken-off sweep continues where it was.
"""

import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from rrl.errors import UserError
from rrl.eval.curves import plot_spread
from rrl.eval.summary import table
from rrl.train.metrics import read_metrics

GRPO, SFT = "GRPO", "SFT continued"
ARMS = {GRPO: "", SFT: "", "rewards permuted": "control=permuted", "search off": "control=search_off"}
"""Config argument of each arm; supervised training goes on with the cold start's own command instead."""


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


def compare(
    config: str, cold_start: str, root: str | pathlib.Path, arms: Sequence[str], seeds: Sequence[int]
) -> str:
    """Runs what is missing and returns the table; `root` gets compare.png, compare.txt and a folder a run.

    `config` is a config file with arguments, without seed and control; `cold_start` the one that made its policy, with
    init=POLICY: the supervised arm goes on with it for as long as GRPO took with the same seed.
    """
    root = pathlib.Path(root)
    plan = cells(root, arms, seeds)
    for cell in plan:
        if not (cell.workdir / "summary.txt").exists():
            for command in commands(cell, config, cold_start, plan):
                print("python", *command, file=sys.stderr, flush=True)
                subprocess.run([sys.executable, *command], check=True)
    runs = {arm: [_curve(c, plan) for c in plan if c.arm == arm] for arm in arms}
    panels = {"eval/em": "held-out exact match", "eval/f1": "held-out F1"}
    plot_spread(runs, root / "compare.png", panels, x="minutes", title=f"{config}: arms over seeds")
    text = "\n".join(rows(plan, arms))
    (root / "compare.txt").write_text(text + "\n", encoding="utf-8")
    return text


def commands(cell: Cell, config: str, cold_start: str, plan: Sequence[Cell]) -> list[list[str]]:
    """What makes one run: training, or supervised training and an evaluation of its model."""
    if cell.arm != SFT:
        return [_train(config, cell.workdir, f"seed={cell.seed}", ARMS[cell.arm])]
    minutes = next((_ends(c)[2] for c in plan if c.arm == GRPO and c.seed == cell.seed), None)
    if minutes is None:
        raise UserError(
            f"the arm {SFT!r} trains for as long as {GRPO!r} took: list {GRPO!r} before it in arms"
        )
    folder = cell.workdir / "sft"
    longer = with_arguments(cold_start, f"seed={cell.seed + 1}", f"minutes={minutes:.2f}")
    return [
        ["launch/sft.py", f"--config={longer}", f"--workdir={folder}"],
        _train(config, cell.workdir, "steps=0", "prompt=bare", f"policy={folder / 'model'}"),
    ]


def with_arguments(config: str, *more: str) -> str:
    """A config flag with further arguments."""
    file, _, given = config.partition(":")
    return f"{file}:{','.join(filter(None, [given, *more]))}"


def _train(config: str, workdir: pathlib.Path, *more: str) -> list[str]:
    return ["launch/train.py", f"--config={with_arguments(config, *more)}", f"--workdir={workdir}"]


def rows(plan: Sequence[Cell], arms: Sequence[str]) -> list[str]:
    """Held-out exact match before and after, by arm: mean over seeds, and each seed's gain, in points."""
    lines: list[tuple[str, ...]] = [("", "EM before", "EM after", "gain", "by seed", "minutes of training")]
    for arm in arms:
        ends = [_ends(cell) if arm != SFT else _sft_ends(cell, plan) for cell in plan if cell.arm == arm]
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
        raise UserError(
            f"{cell.metrics} holds no evaluation; delete {cell.workdir} and run the comparison again"
        )
    return found[0]["eval/em"], found[-1]["eval/em"], found[-1]["minutes"]


def _sft_ends(cell: Cell, plan: Sequence[Cell]) -> tuple[float, float, float]:
    """The start and the minutes are those of GRPO with the same seed."""
    before, _, minutes = next(_ends(c) for c in plan if c.arm == GRPO and c.seed == cell.seed)
    return before, _ends(cell)[1], minutes


def _curve(cell: Cell, plan: Sequence[Cell]) -> list[dict[str, Any]]:
    """A run's evaluations; the supervised arm has its two ends."""
    lines = [line for line in read_metrics(cell.metrics) if "eval/em" in line]
    if cell.arm == SFT:
        start = next(c for c in plan if c.arm == GRPO and c.seed == cell.seed)
        first = next(line for line in read_metrics(start.metrics) if "eval/em" in line)
        return [first, lines[-1] | {"step": 1, "minutes": _ends(start)[2]}]
    return lines
