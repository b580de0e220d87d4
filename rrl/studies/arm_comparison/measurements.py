"""What the runs of a comparison measured: the table and the curves of held-out metrics."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rrl.errors import UserError
from rrl.report.summary import table
from rrl.runs.metrics import read_metrics
from rrl.studies.arm_comparison.arms import GRPO, SFT, ArmRun

TITLES = {"em": "exact match", "f1": "F1", "full_recall": "full recall", "map": "mAP"}
"""Metric -> its name in plot titles and table headings."""
ABBREVIATIONS = {"em": "EM"}
"""Metric -> a shorter name for table headings, where `TITLES` is too long."""


def table_rows(runs: Sequence[ArmRun], metric: str = "em") -> list[str]:
    """Return the table, one row per arm: a held-out metric before and after training (mean over seeds), and the gain of each seed
    in percentage points."""
    title = ABBREVIATIONS.get(metric, TITLES.get(metric, metric))
    lines: list[tuple[str, ...]] = [
        ("", "seeds", f"{title} before", f"{title} after", "gain", "by seed", "minutes")
    ]
    for arm in dict.fromkeys(run.arm for run in runs):
        runs_of_arm = [run for run in runs if run.arm == arm]
        measured = [
            _measurements(run, metric) if arm != SFT else _sft_measurements(run, runs, metric)
            for run in runs_of_arm
        ]
        before, after, minutes = (np.array(column) for column in zip(*measured, strict=True))
        gains = 100 * (after - before)
        lines.append(
            (
                arm,
                " ".join(str(run.seed) for run in runs_of_arm),
                f"{100 * before.mean():.1f}",
                f"{100 * after.mean():.1f}",
                f"{gains.mean():+.1f}",
                " ".join(f"{gain:+.1f}" for gain in gains),
                f"{minutes.mean():.1f}",
            )
        )
    return table(lines)


class Measurements(NamedTuple):
    """A held-out metric before and after training."""

    before: float
    """At the run's first evaluation."""
    after: float
    """At the run's last evaluation."""
    minutes: float
    """Minutes of training."""


def _measurements(run: ArmRun, metric: str = "em") -> Measurements:
    """Return what the run's metrics.jsonl holds. Raises UserError if the metric is missing."""
    evaluations = [line for line in read_metrics(run.metrics) if "eval/em" in line]
    if not evaluations:
        raise UserError(
            f"{run.metrics} holds no evaluation; delete {run.workdir} and run the comparison again"
        )
    name = f"eval/{metric}"
    if name not in evaluations[0]:
        available = sorted(key.removeprefix("eval/") for key in evaluations[0] if key.count("/") == 1)
        raise UserError(f"metric={metric!r} is not in {run.metrics}; choose {', '.join(available)}")
    return Measurements(evaluations[0][name], evaluations[-1][name], evaluations[-1]["minutes"])


def _sft_measurements(run: ArmRun, runs: Sequence[ArmRun], metric: str) -> Measurements:
    """Return the measurements of a run of the supervised arm. `before` and `minutes` are those of GRPO with the same seed."""
    return grpo_measurements(run, runs, metric)._replace(after=_measurements(run, metric).after)


def _grpo_run(run: ArmRun, runs: Sequence[ArmRun]) -> ArmRun:
    """Return the GRPO run with the same seed."""
    return next(other for other in runs if other.arm == GRPO and other.seed == run.seed)


def grpo_measurements(run: ArmRun, runs: Sequence[ArmRun], metric: str = "em") -> Measurements:
    """Return the measurements of the GRPO run with the same seed."""
    return _measurements(_grpo_run(run, runs), metric)


def evaluation_curve(run: ArmRun, runs: Sequence[ArmRun]) -> list[dict[str, Any]]:
    """Return the evaluation lines of a run.

    The supervised arm has two: GRPO's first one and its own last one. The latter gets GRPO's minutes, and step 1, since the arm's
    steps are not comparable.
    """
    lines = [line for line in read_metrics(run.metrics) if "eval/em" in line]
    if run.arm == SFT:
        grpo = _grpo_run(run, runs)
        first = next(line for line in read_metrics(grpo.metrics) if "eval/em" in line)
        return [first, lines[-1] | {"step": 1, "minutes": _measurements(grpo).minutes}]
    return lines
