"""What produced a run: its commands, config files, models and data. Runs of another experiment are refused.

The file `command.json` in a workdir holds the run's provenance: its commands and the hashes of its config files.
"""

import dataclasses
import hashlib
import json
import pathlib
import sys
from collections.abc import Sequence

from rrl.config.config_flag import split_config
from rrl.errors import UserError
from rrl.files import saving, shipped, write_atomically
from rrl.runs.workdir import CONFIG, read_identity
from rrl.studies.arm_comparison.arms import SFT, ArmRun, commands, config_of_arm, is_config_file

PROVENANCE_FILE = "command.json"


def provenance_of(run: ArmRun, config: str, cold_start: str) -> str:
    """Return the provenance of a run as JSON: its commands and the SHA-256 of its config files.

    Workdir and minutes are replaced by placeholders, so runs that differ only in these have the same provenance.
    """
    own_commands = commands(
        dataclasses.replace(run, workdir=pathlib.Path("WORKDIR")), config, cold_start, 0.0
    )
    hashes = {}
    for file in [
        split_config(config_of_arm(run.arm, config)[0])[0],
        *([split_config(cold_start)[0]] if run.arm == SFT else []),
    ]:
        if not shipped(file).is_file():
            raise UserError(f"config file {file!r} does not exist; give one, such as configs/rsearch_grpo.py")
        hashes[file] = hashlib.sha256(shipped(file).read_bytes()).hexdigest()[:16]
    return json.dumps({"commands": own_commands, "sha256": hashes})


def save_provenance(run: ArmRun, provenance: str) -> None:
    """Write the provenance into the run's workdir."""
    with saving(run.workdir / PROVENANCE_FILE):
        write_atomically(run.workdir / PROVENANCE_FILE, provenance)


def refuse_other_provenance(run: ArmRun, provenance: str) -> None:
    """Raise UserError if other commands or config files produced the contents of the workdir."""
    stored = stored_provenance(run)
    if stored not in (None, provenance):
        raise UserError(
            f"{run.workdir} was made by {stored}, not by {provenance}; give another --out, or delete that folder"
        )
    if run.finished and stored is None:
        print(
            f"{run.workdir}: used without a check, since it has no command.json", file=sys.stderr, flush=True
        )


def stored_provenance(run: ArmRun) -> str | None:
    """Return the provenance stored in a run's workdir; None if there is none. Raises UserError if it is unreadable."""
    file = run.workdir / PROVENANCE_FILE
    try:
        return file.read_text(encoding="utf-8") if file.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UserError(
            f"{file}, which holds the run's provenance, cannot be read ({reason}); restore the file, give another "
            "--out, or delete that folder"
        ) from error


def refuse_mixed_models(runs: Sequence[ArmRun]) -> None:
    """Raise UserError if a model has changed between two runs, although its path is the same.

    Policy, reader and encoder are compared by the hashes that the runs recorded. A run without one of them is compatible with all
    others; the arm "search off" has no encoder, for example. Arms of other config files may start from other policies;
    `arm_differences` reports these.
    """
    first_use: dict[tuple[str, str], tuple[ArmRun, str]] = {}
    for run in runs:
        if run.arm == SFT or not (run.workdir / CONFIG).exists():
            continue
        identity = read_identity(run.workdir, "policy", "reader", "retriever")
        hashes = {name: identity[name] for name in ("policy", "reader")} | {
            "encoder": identity["retriever"]["encoder"]
        }
        for name, sha256 in hashes.items():
            if not sha256:
                continue
            # Policies are compared between the arms of one config file only.
            config_file = split_config(run.arm)[0] if name == "policy" and is_config_file(run.arm) else ""
            other, expected = first_use.setdefault((name, config_file), (run, sha256))
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
