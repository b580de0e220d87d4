"""The arms of a comparison, their runs, and the commands of each run. Read `arm_runs` and `commands` first."""

import dataclasses
import pathlib
import re
from collections.abc import Sequence

from rrl.config.config_flag import arguments_by_name, split_config, with_arguments
from rrl.errors import UserError

GRPO, SFT = "GRPO", "SFT continued"
ARM_ARGUMENTS = {
    GRPO: "",
    SFT: "",
    "rewards permuted": "control=permuted",
    "search off": "control=search_off",
}
"""Named arm -> the config argument that it adds. The supervised arm ("SFT continued") adds none: it continues the supervised
training of the cold start.

Two other forms of arm are allowed: any `NAME=VALUE` argument of the config, and the path of another config file. The other config
file receives the arguments of the compared config, and the arm may add one (`configs/search_r1.py:control=permuted`).
"""


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
      UserError: an arm is unknown, `arms` or `seeds` is empty or has duplicates, two arms would share a folder, or the supervised
        arm comes before GRPO.
    """
    for name, values in (("arms", list(arms)), ("seeds", list(seeds))):
        if not values or len(set(values)) < len(values):
            raise UserError(f"{name}={values} must be one or more, each once")
    unknown = [arm for arm in arms if not (arm in ARM_ARGUMENTS or "=" in arm or is_config_file(arm))]
    unknown += [arm for arm in arms if "seed" in _arguments_in_name(arm)]
    if unknown:
        raise UserError(
            f"arms={unknown} are unknown; choose {', '.join(ARM_ARGUMENTS)}, any argument of the config except the seed "
            "(ablation=filter), or another config file (configs/rsearch_ppo.py, or configs/search_r1.py:control=permuted)"
        )
    folders = [arm_run(root, arm, 0).workdir for arm in arms]
    if len(set(folders)) < len(folders):
        raise UserError(f"arms={list(arms)}: two of them would share one folder; leave one out")
    if SFT in arms and GRPO not in arms[: arms.index(SFT)]:
        raise UserError(
            f"arms={list(arms)}: the arm {SFT!r} trains for as long as {GRPO!r} took: list {GRPO!r} before it"
        )
    return [arm_run(root, arm, seed) for seed in seeds for arm in arms]


def arm_run(root: pathlib.Path, arm: str, seed: int) -> ArmRun:
    """Return one run, whose workdir is a folder of `root`."""
    name = re.sub(r"[^\w.=-]+", "_", arm)
    return ArmRun(arm, seed, root / f"{name}-{seed}")


def is_config_file(arm: str) -> bool:
    """Return whether an arm is another config file."""
    return split_config(arm)[0].endswith(".py")


def _arguments_in_name(arm: str) -> dict[str, str]:
    """Return the arguments that an arm's name contains: those of a config file, or the arm itself."""
    return split_config(arm)[1] if is_config_file(arm) else arguments_by_name(arm)


def config_of_arm(arm: str, config: str) -> tuple[str, str]:
    """Return the config of an arm, and the argument that the arm adds."""
    file, arguments = split_config(arm)
    if file.endswith(".py"):
        added = ",".join(arguments.values())  # each value is "name=value"
        return ":".join([file, *config.split(":", 1)[1:]]), added
    return config, ARM_ARGUMENTS.get(arm, arm)


def commands(run: ArmRun, config: str, cold_start: str, minutes: float) -> list[list[str]]:
    """Return the commands of one run.

    An RL arm has one training command. The supervised arm trains for `minutes` and then evaluates its model.
    """
    if run.arm != SFT:
        arm_config, argument = config_of_arm(run.arm, config)
        return [_train_command(arm_config, run.workdir, f"seed={run.seed}", argument)]
    folder = run.workdir / "sft"
    # minutes=0 would mean no limit. The cold start's default seed is 0, which seed + 1 never repeats.
    sft_config = with_arguments(cold_start, f"seed={run.seed + 1}", f"minutes={max(minutes, 0.01):.2f}")
    return [
        ["launch/sft.py", f"--config={sft_config}", f"--workdir={folder}"],
        _train_command(config, run.workdir, "steps=0", f"policy={folder / 'model'}"),
    ]


def _train_command(config: str, workdir: pathlib.Path, *more: str) -> list[str]:
    return ["launch/train.py", f"--config={with_arguments(config, *more)}", f"--workdir={workdir}"]
