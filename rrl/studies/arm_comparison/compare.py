"""Compare the arms of one experiment over several seeds: GRPO against its controls, PPO, ablations.

Read `compare` first. Each run is a subprocess with its own workdir, so an interrupted comparison continues where it stopped.
"""

import contextlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from rrl.config.config_flag import split_config
from rrl.errors import UserError
from rrl.files import saving, shipped, write_atomically
from rrl.report.curves import plot_spread
from rrl.runs.launcher import EXIT_STOPPED, EXIT_TRY_AGAIN, EXIT_USER_ERROR
from rrl.stopping import RunStopped, ServiceUnavailable
from rrl.studies.arm_comparison.arms import ARM_ARGUMENTS, GRPO, SFT, ArmRun, arm_run, arm_runs, commands
from rrl.studies.arm_comparison.measurements import TITLES, evaluation_curve, grpo_measurements, table_rows
from rrl.studies.arm_comparison.provenance import (
    arm_differences,
    provenance_of,
    refuse_mixed_models,
    refuse_other_provenance,
    save_provenance,
    stored_provenance,
)

RESERVED_ARGUMENTS = {"config": ("seed", "control"), "cold_start": ("seed", "minutes")}
"""Flag -> arguments of its config that the comparison sets itself."""
X_COLUMNS = {"minutes": "minutes", "updates": "step"}
"""Choice of x-axis -> the column of metrics.jsonl that is plotted there."""


def compare(
    config: str,
    cold_start: str,
    root: str | pathlib.Path,
    arms: Sequence[str],
    seeds: Sequence[int],
    metric: str = "em",
    over: str = "minutes",
) -> str:
    """Run what is missing and return the comparison as a table.

    `root` receives one folder per run, compare.png, compare.txt and compare.jsonl. Table and plot hold all finished runs of these
    configs in `root`, not only those of this call. So several processes can share the work, each with other seeds; the last one
    to end writes the complete table.

    Args:
      config: a config file with arguments, without seed and control.
      cold_start: the config that trained the starting policy, with `init=POLICY`. The supervised arm continues it for as many
        minutes as GRPO took with the same seed.
      root: folder for the runs and the results.
      arms: names of arms; see `ARM_ARGUMENTS`.
      seeds: training seeds.
      metric: the held-out metric of the table, a fraction in [0, 1] (for R2AG: "full_recall").
      over: x-axis of the plot: "minutes" of training, or "updates" if the runs used different machines.

    Raises:
      UserError: wrong arguments, or a workdir that another config produced.
      SaveError: a result could not be written.
      CalledProcessError, RunStopped, ServiceUnavailable: as `run_commands`; the run has printed its own error.
    """
    _refuse_reserved_arguments(config, cold_start)
    if over not in X_COLUMNS or (X_COLUMNS[over] == "step" and SFT in arms):
        raise UserError(
            f"over={over!r} must be {' or '.join(X_COLUMNS)}; the arm {SFT!r} is comparable by minutes only, not by updates"
        )
    root = pathlib.Path(root)
    planned = arm_runs(root, arms, seeds)
    for run in planned:
        refuse_other_provenance(run, provenance_of(run, config, cold_start))
    for run in planned:
        if not run.finished:
            minutes = grpo_measurements(run, planned).minutes if run.arm == SFT else 0.0
            run_commands(
                run, commands(run, config, cold_start, minutes), provenance_of(run, config, cold_start)
            )
    runs = finished_runs(root, config, cold_start, arms)
    refuse_mixed_models(runs)
    plot_arms(runs, metric, X_COLUMNS[over], f"{config}: arms over seeds", root / "compare.png")
    return _write_table(runs, metric, root)


def _refuse_reserved_arguments(config: str, cold_start: str) -> None:
    for flag, value in (("config", config), ("cold_start", cold_start)):
        if reserved := [name for name in RESERVED_ARGUMENTS[flag] if name in split_config(value)[1]]:
            raise UserError(
                f"{flag}={value} gives {', '.join(reserved)}, which the comparison sets; leave it out"
            )


def plot_arms(runs: Sequence[ArmRun], metric: str, x: str, title: str, png: pathlib.Path) -> None:
    """Plot the held-out metric and F1 of each arm, with their spread over seeds. `x` is a column of metrics.jsonl."""
    curves = {
        arm: [evaluation_curve(run, runs) for run in runs if run.arm == arm]
        for arm in dict.fromkeys(run.arm for run in runs)
    }
    panels = {f"eval/{name}": f"held-out {TITLES.get(name, name)}" for name in (metric, "f1")}
    with saving(png):
        plot_spread(curves, png, panels, x=x, title=title)


def _write_table(runs: Sequence[ArmRun], metric: str, root: pathlib.Path) -> str:
    """Write compare.jsonl, which has all evaluations, and compare.txt. Returns the text of the latter."""
    lines = [
        {"arm": run.arm, "seed": run.seed} | line for run in runs for line in evaluation_curve(run, runs)
    ]
    evaluations = "".join(f"{json.dumps(line)}\n" for line in lines)
    text = "\n".join([*table_rows(runs, metric), *(f"* {line}" for line in arm_differences(runs))])
    for name, content in (("compare.jsonl", evaluations), ("compare.txt", text + "\n")):
        with saving(root / name):
            write_atomically(root / name, content)
    return text


def finished_runs(root: pathlib.Path, config: str, cold_start: str, arms: Sequence[str] = ()) -> list[ArmRun]:
    """Return the finished runs of these configs in the folder, sorted by arm and seed.

    It looks for the arms of `ARM_ARGUMENTS` and for those in `arms`. A run of the supervised arm counts only if the GRPO run with
    the same seed is finished too. A run without a stored provenance is included, since its configs cannot be checked.
    """
    seeds = {int(folder.name.rpartition("-")[2]) for folder in root.glob("*-[0-9]*")}
    all_arms = dict.fromkeys([*ARM_ARGUMENTS, *arms])
    runs = [run for arm in all_arms for seed in sorted(seeds) if (run := arm_run(root, arm, seed)).finished]
    runs = [run for run in runs if stored_provenance(run) in (None, provenance_of(run, config, cold_start))]
    grpo = {run.seed for run in runs if run.arm == GRPO}
    return [run for run in runs if run.arm != SFT or run.seed in grpo]


def run_commands(run: ArmRun, commands_of_run: Sequence[Sequence[str]], provenance: str) -> None:
    """Execute the commands of a run.

    Raises:
      CalledProcessError: a command failed.
      RunStopped: a signal stopped a command.
      ServiceUnavailable: a command ended because a judge or reader service did not respond.
    """
    for command in commands_of_run:
        print("python", *command, file=sys.stderr, flush=True)
        code = wait_for(subprocess.Popen([sys.executable, str(shipped(command[0])), *command[1:]]))
        if code != EXIT_USER_ERROR and run.workdir.is_dir():
            save_provenance(run, provenance)
        if code == EXIT_STOPPED or code < 0:
            raise RunStopped(
                f"the run {run.workdir} was stopped by a signal (exit code {code}); the same command continues it"
            )
        if code == EXIT_TRY_AGAIN:
            raise ServiceUnavailable(
                f"the run {run.workdir} ended because a service did not respond (exit code {code})"
            )
        if code:
            raise subprocess.CalledProcessError(code, command)


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process.

    Ctrl-C also reaches the process: the first one makes it save and end, the second one ends it at once.
    """
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()
