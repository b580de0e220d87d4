"""Compares the arms of one experiment over several seeds: GRPO against its controls, PPO, ablations.

Read `compare` first. Each run is a subprocess with its own workdir, so an interrupted comparison continues
where it stopped. The file `command.json` in a workdir holds the run's provenance (its commands and the hashes
of its config files), so a run of another experiment is never reused by mistake.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rrl.config.config_flag import split_config, with_arguments
from rrl.errors import UserError
from rrl.files import saving, shipped, write_atomically
from rrl.report.curves import plot_spread
from rrl.report.summary import table
from rrl.runs.launcher import EXIT_STOPPED, EXIT_TRY_AGAIN, EXIT_USER_ERROR
from rrl.runs.metrics import read_metrics
from rrl.runs.workdir import CONFIG, read_identity
from rrl.stopping import RunStopped, ServiceUnavailable

GRPO, SFT = "GRPO", "SFT continued"
ARM_ARGUMENTS = {
    GRPO: "",
    SFT: "",
    "rewards permuted": "control=permuted",
    "search off": "control=search_off",
}
"""Named arm -> the config argument that it adds. The supervised arm ("SFT continued") adds none: it continues the
supervised training of the cold start.

Two other forms of arm are allowed: any `NAME=VALUE` argument of the config, and the path of another config
file. The other config receives the same arguments and may add one more
(`configs/search_r1.py:control=permuted`).
"""
RESERVED_ARGUMENTS = {"config": ("seed", "control"), "cold_start": ("seed", "minutes")}
"""Flag -> arguments of its config that the comparison sets itself."""
TITLES = {"em": "exact match", "f1": "F1", "full_recall": "full recall", "map": "mAP"}
"""Metric -> its name in plot titles and table headings."""
AXES = {"minutes": "minutes", "updates": "step"}
"""Choice of x-axis -> the column of metrics.jsonl that is plotted there."""
ABBREVIATIONS = {"em": "EM"}
"""Metric -> a shorter name for table headings, where `TITLES` is too long."""


@dataclasses.dataclass(frozen=True)
class ArmRun:
    """One run: one arm with one seed."""

    arm: str
    seed: int
    workdir: pathlib.Path

    @property
    def metrics(self) -> pathlib.Path:
        """The run's metrics.jsonl."""
        return self.workdir / "metrics.jsonl"

    @property
    def finished(self) -> bool:
        """Whether the run has written its summary."""
        return (self.workdir / "summary.txt").exists()


def arm_runs(root: pathlib.Path, arms: Sequence[str], seeds: Sequence[int]) -> list[ArmRun]:
    """Return all runs, seed by seed, so that an interrupted comparison still has complete seeds.

    Raises:
      UserError: an arm is unknown, `arms` or `seeds` is empty or has duplicates, two arms would share a
        folder, or the supervised arm comes before GRPO.
    """
    for name, given in (("arms", list(arms)), ("seeds", list(seeds))):
        if not given or len(set(given)) < len(given):
            raise UserError(f"{name}={given} must be one or more, each once")
    unknown = [
        arm
        for arm in arms
        if not (arm in ARM_ARGUMENTS or "=" in arm or split_config(arm)[0].endswith(".py"))
    ]
    if unknown := unknown + [
        arm for arm in arms if "seed" in (split_config(arm)[1] or split_config(":" + arm)[1])
    ]:
        raise UserError(
            f"arms={unknown} are unknown; choose {', '.join(ARM_ARGUMENTS)}, any argument of the config except the seed "
            "(ablation=filter), or another config file (configs/rsearch_ppo.py, or configs/search_r1.py:control=permuted)"
        )
    folders = [_arm_run(root, arm, 0).workdir for arm in arms]
    if len(set(folders)) < len(folders):
        raise UserError(f"arms={list(arms)}: two of them would share one folder; leave one out")
    if SFT in arms and GRPO not in arms[: arms.index(SFT)]:
        raise UserError(
            f"arms={list(arms)}: the arm {SFT!r} trains for as long as {GRPO!r} took: list {GRPO!r} before it"
        )
    return [_arm_run(root, arm, seed) for seed in seeds for arm in arms]


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

    `root` receives one folder per run, compare.png, compare.txt and compare.jsonl. Table and plot hold all
    finished runs of these configs in `root`, not only those of this call. So several processes can share the
    work, each with other seeds; the last one to end writes the complete table.

    Args:
      config: a config file with arguments, without seed and control.
      cold_start: the config that trained the starting policy, with `init=POLICY`. The supervised arm
        continues it for as many minutes as GRPO took with the same seed.
      root: folder for the runs and the results.
      arms: names of arms; see `ARM_ARGUMENTS`.
      seeds: training seeds.
      metric: the held-out metric of the table, a share in [0, 1] (for R2AG: "full_recall").
      over: x-axis of the plot: "minutes" of training, or "updates" if the runs used different machines.

    Raises:
      UserError: wrong arguments, or a workdir that another config produced.
      SaveError: a result could not be written.
      CalledProcessError, RunStopped, ServiceUnavailable: as `run_commands`; the run has printed its own error.
    """
    for flag, value in (("config", config), ("cold_start", cold_start)):
        if given := [name for name in RESERVED_ARGUMENTS[flag] if name in split_config(value)[1]]:
            raise UserError(
                f"{flag}={value} gives {', '.join(given)}, which the comparison sets; leave it out"
            )
    if over not in AXES or (AXES[over] == "step" and SFT in arms):
        raise UserError(
            f"over={over!r} must be {' or '.join(AXES)}; the arm {SFT!r} is comparable by minutes only, not by updates"
        )
    root = pathlib.Path(root)
    planned = arm_runs(root, arms, seeds)
    for run in planned:
        refuse_other_provenance(run, provenance_of(run, config, cold_start))
    for run in planned:
        if not run.finished:
            minutes = _grpo_measurements(run, planned).minutes if run.arm == SFT else 0.0
            run_commands(
                run, commands(run, config, cold_start, minutes), provenance_of(run, config, cold_start)
            )
    runs = finished_runs(root, config, cold_start, arms)
    refuse_mixed_models(runs)
    curves = {
        arm: [_curve(run, runs) for run in runs if run.arm == arm]
        for arm in dict.fromkeys(run.arm for run in runs)
    }
    panels = {f"eval/{name}": f"held-out {TITLES.get(name, name)}" for name in (metric, "f1")}
    with saving(root / "compare.png"):
        plot_spread(curves, root / "compare.png", panels, x=AXES[over], title=f"{config}: arms over seeds")
    lines = [{"arm": run.arm, "seed": run.seed} | line for run in runs for line in _curve(run, runs)]
    text = "\n".join([*table_rows(runs, metric), *(f"* {line}" for line in arm_differences(runs))])
    evaluations = "".join(f"{json.dumps(line)}\n" for line in lines)
    for name, content in (("compare.jsonl", evaluations), ("compare.txt", text + "\n")):
        with saving(root / name):
            write_atomically(root / name, content)
    return text


def finished_runs(root: pathlib.Path, config: str, cold_start: str, arms: Sequence[str] = ()) -> list[ArmRun]:
    """Return the finished runs of these configs in the folder, sorted by arm and seed.

    The arms are the named ones and `arms`. A supervised run counts only if the GRPO run with its seed is
    finished.
    """
    seeds = {int(folder.name.rpartition("-")[2]) for folder in root.glob("*-[0-9]*")}
    all_arms = dict.fromkeys([*ARM_ARGUMENTS, *arms])
    runs = [run for arm in all_arms for seed in sorted(seeds) if (run := _arm_run(root, arm, seed)).finished]
    runs = [run for run in runs if _stored_provenance(run) in (None, provenance_of(run, config, cold_start))]
    grpo = {run.seed for run in runs if run.arm == GRPO}
    return [run for run in runs if run.arm != SFT or run.seed in grpo]


def _arm_run(root: pathlib.Path, arm: str, seed: int) -> ArmRun:
    name = re.sub(r"[^\w.=-]+", "_", arm)
    return ArmRun(arm, seed, root / f"{name}-{seed}")


def _config_of_arm(arm: str, config: str) -> tuple[str, str]:
    """Return the config of an arm, and the argument that the arm adds."""
    file, given = split_config(arm)
    if file.endswith(".py"):
        return ":".join([file, *config.split(":", 1)[1:]]), ",".join(given.values())
    return config, ARM_ARGUMENTS.get(arm, arm)


def run_commands(run: ArmRun, todo: Sequence[Sequence[str]], provenance: str) -> None:
    """Execute the commands of a run.

    Raises:
      CalledProcessError: a command failed.
      RunStopped: a signal stopped a command.
      ServiceUnavailable: a command ended because a judge or reader service did not respond.
    """
    for command in todo:
        print("python", *command, file=sys.stderr, flush=True)
        code = wait_for(subprocess.Popen([sys.executable, str(shipped(command[0])), *command[1:]]))
        if code != EXIT_USER_ERROR and run.workdir.is_dir():
            with saving(run.workdir / "command.json"):
                write_atomically(run.workdir / "command.json", provenance)
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


def provenance_of(run: ArmRun, config: str, cold_start: str) -> str:
    """Return the provenance of a run as JSON: its commands and the SHA-256 of its config files.

    Workdir and minutes are replaced by placeholders, so that they do not matter.
    """
    own_commands = commands(
        dataclasses.replace(run, workdir=pathlib.Path("WORKDIR")), config, cold_start, 0.0
    )
    hashes = {}
    for file in [
        split_config(_config_of_arm(run.arm, config)[0])[0],
        *([split_config(cold_start)[0]] if run.arm == SFT else []),
    ]:
        if not shipped(file).is_file():
            raise UserError(f"config file {file!r} does not exist; give one, such as configs/rsearch_grpo.py")
        hashes[file] = hashlib.sha256(shipped(file).read_bytes()).hexdigest()[:16]
    return json.dumps({"commands": own_commands, "sha256": hashes})


def refuse_other_provenance(run: ArmRun, provenance: str) -> None:
    """Raise UserError if other commands or config files produced the contents of the workdir."""
    stored = _stored_provenance(run)
    if stored not in (None, provenance):
        raise UserError(
            f"{run.workdir} was made by {stored}, not by {provenance}; give another --out, or delete that folder"
        )
    if run.finished and stored is None:
        print(
            f"{run.workdir}: used without a check, since it has no command.json", file=sys.stderr, flush=True
        )


def _stored_provenance(run: ArmRun) -> str | None:
    """Return the provenance stored in a run's workdir, or None. Raise UserError if it is unreadable."""
    file = run.workdir / "command.json"
    try:
        return file.read_text(encoding="utf-8") if file.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UserError(
            f"{file}, which holds the run's provenance, cannot be read ({reason}); restore the file, give another "
            "--out, or delete that folder"
        ) from error


def refuse_mixed_models(runs: Sequence[ArmRun]) -> None:
    """Raise UserError if two runs used different models under the same paths, by their recorded hashes.

    It compares the policy, the reader and the encoder. A run without one of them is compatible with all others; the arm
    "search off" has no encoder, for example. Arms of other config files may start from other policies;
    `arm_differences` reports these.
    """
    first: dict[tuple[str, str], tuple[ArmRun, str]] = {}
    for run in runs:
        if run.arm == SFT or not (run.workdir / CONFIG).exists():
            continue
        identity = read_identity(run.workdir, "policy", "reader", "retriever")
        models = {name: identity[name] for name in ("policy", "reader")} | {
            "encoder": identity["retriever"]["encoder"]
        }
        file_of = split_config(run.arm)[0]
        for name, sha256 in models.items():
            model = (name, file_of if name == "policy" and file_of.endswith(".py") else "")
            other, expected = first.setdefault(model, (run, sha256)) if sha256 else (run, sha256)
            if sha256 != expected:
                raise UserError(
                    f"{other.workdir} and {run.workdir} used different models ({name}: {expected} and {sha256}); delete "
                    "the one that is out of date and run the comparison again"
                )


def arm_differences(runs: Sequence[ArmRun]) -> list[str]:
    """Return one line for each setting in which arms differ, with the value of each arm.

    It compares the questions, the corpus, the search settings and the starting policies.
    """
    arms_by_value: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        if not (run.workdir / CONFIG).exists():
            continue
        identity = read_identity(run.workdir, *(() if run.arm == SFT else ("policy",)))
        fields = {
            f"{part}.{name}": value
            for part in ("data", "retriever")
            for name, value in identity.get(part, {}).items()
        }
        fields |= {"rollout.top_k": identity.get("rollout", {}).get("top_k")}
        if run.arm != SFT:
            fields |= {"policy (SHA-256)": identity["policy"][:12]}
        for name, value in fields.items():
            arms_with_value = arms_by_value.setdefault(name, {}).setdefault(json.dumps(value), [])
            arms_with_value += [run.arm] * (run.arm not in arms_with_value)
    return [
        f"{name} differs: " + "; ".join(f"{', '.join(arms)}: {value}" for value, arms in groups.items())
        for name, groups in arms_by_value.items()
        if len(groups) > 1
    ]


def commands(run: ArmRun, config: str, cold_start: str, minutes: float) -> list[list[str]]:
    """Return the commands of one run.

    An RL arm has one training command. The supervised arm trains for `minutes` and then evaluates its model.
    """
    if run.arm != SFT:
        arm_config, argument = _config_of_arm(run.arm, config)
        return [_train(arm_config, run.workdir, f"seed={run.seed}", argument)]
    folder = run.workdir / "sft"
    # minutes=0 would mean no limit. The cold start's default seed is 0, which seed + 1 never repeats.
    sft_config = with_arguments(cold_start, f"seed={run.seed + 1}", f"minutes={max(minutes, 0.01):.2f}")
    return [
        ["launch/sft.py", f"--config={sft_config}", f"--workdir={folder}"],
        _train(config, run.workdir, "steps=0", f"policy={folder / 'model'}"),
    ]


def _train(config: str, workdir: pathlib.Path, *more: str) -> list[str]:
    return ["launch/train.py", f"--config={with_arguments(config, *more)}", f"--workdir={workdir}"]


def table_rows(runs: Sequence[ArmRun], metric: str = "em") -> list[str]:
    """Return the table, one row per arm: a held-out metric before and after training (mean over seeds), and the gain
    of each seed in percentage points."""
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


class _Measurements(NamedTuple):
    """A held-out metric before and after training."""

    before: float
    """At the run's first evaluation."""
    after: float
    """At the run's last evaluation."""
    minutes: float
    """Minutes of training."""


def _measurements(run: ArmRun, metric: str = "em") -> _Measurements:
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
    return _Measurements(evaluations[0][name], evaluations[-1][name], evaluations[-1]["minutes"])


def _sft_measurements(run: ArmRun, runs: Sequence[ArmRun], metric: str) -> _Measurements:
    """Return the same for the supervised arm. `before` and `minutes` are those of GRPO with the same seed."""
    return _grpo_measurements(run, runs, metric)._replace(after=_measurements(run, metric).after)


def _grpo_run(run: ArmRun, runs: Sequence[ArmRun]) -> ArmRun:
    """Return the GRPO run with the same seed."""
    return next(other for other in runs if other.arm == GRPO and other.seed == run.seed)


def _grpo_measurements(run: ArmRun, runs: Sequence[ArmRun], metric: str = "em") -> _Measurements:
    return _measurements(_grpo_run(run, runs), metric)


def _curve(run: ArmRun, runs: Sequence[ArmRun]) -> list[dict[str, Any]]:
    """Return the evaluation lines of a run. The supervised arm has two: GRPO's first one and its own last one."""
    lines = [line for line in read_metrics(run.metrics) if "eval/em" in line]
    if run.arm == SFT:
        grpo = _grpo_run(run, runs)
        first = next(line for line in read_metrics(grpo.metrics) if "eval/em" in line)
        return [first, lines[-1] | {"step": 1, "minutes": _measurements(grpo).minutes}]
    return lines
