"""All of it in one call: what is missing is run, what it measured is kept, and the page is written."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rrl.errors import UserError
from rrl.files import replaced
from rrl.parallel.runtime import cores_here
from rrl.studies.reproduction.claims import claims_named
from rrl.studies.reproduction.page import list_of, reproduction_page
from rrl.studies.reproduction.plan import planned_runs
from rrl.studies.reproduction.queue import QueueResult, run_queue
from rrl.studies.reproduction.store import MeasurementStore


def reproduce(
    out: Path,
    file: Path,
    *,
    keep: Path | None = None,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    jobs: int | None = None,
    smoke: bool = False,
    listed: bool = False,
    run: bool = True,
    command: str = "python launch/reproduce.py",
) -> QueueResult:
    """Runs in `out` what the claims `only` (none: all) lack, keeps what that measured in `keep` (default: `out`/kept), and
    writes the page of all that is kept, also when a signal ended the runs.

    `listed`: prints what would be run instead. `run` false: writes the page of what is there. `command` is what the page says
    of itself. Raises UserError for unknown claims, and as `rrl.studies.reproduction.queue.run_queue` and
    `rrl.studies.reproduction.store.MeasurementStore`, and where nothing is finished; no page is written then.
    """
    known = planned_runs(seeds, smoke)
    names = [name for claim in claims_named(only) for name in claim.needs(seeds)]
    jobs = jobs if jobs is not None else min(2, cores_here())
    kept = MeasurementStore(keep or out / "kept", known)
    for name, why in kept.outdated.items():
        print(f"{kept.folder}: {name} {why}: it does not count", file=sys.stderr)
    todo = kept.missing_runs(names, out)
    if listed:
        print(list_of(todo, known, out, jobs))
        return QueueResult({})
    done = run_queue(todo, out, jobs) if run else QueueResult({})
    kept.add_finished(out)
    if not kept.entries:
        if done.failed or done.stopped:
            return done
        raise UserError(
            f"nothing is finished in {out}, and nothing kept in {kept.folder}: there is no page to write"
        )
    text = reproduction_page(known, out, kept, seeds, command, smoke)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replaced(file) as stream:
        stream.write(text.encode())
    print(f"{text}\n{file}")
    return done


def seeds_of(given: Sequence[str]) -> list[int]:
    """Seeds from a flag. Raises UserError for none, one that comes twice, or no whole number."""
    if not given or len(set(given)) < len(given) or not all(seed.isdigit() for seed in given):
        raise UserError(f"seeds={','.join(given)} must be whole numbers, one or more, each once")
    return [int(seed) for seed in given]
