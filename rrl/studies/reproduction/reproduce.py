"""Runs the whole reproduction: executes missing runs, stores what they measured, and writes the page."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rrl.errors import UserError
from rrl.files import atomic_stream
from rrl.parallel.runtime import available_cores
from rrl.studies.reproduction.claims import claims_named
from rrl.studies.reproduction.page import describe_runs, reproduction_page
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
    list_only: bool = False,
    run: bool = True,
    command: str = "python launch/reproduce.py",
) -> QueueResult:
    """Execute the missing runs of the claims, store their measurements and write the page.

    The page covers all stored measurements. It is also written if a signal ended the runs.

    Args:
      out: folder of the runs.
      file: the page, Markdown.
      keep: folder of the measurement store; default: `out`/kept.
      only: keys of claims; empty: all.
      seeds: training seeds.
      jobs: number of runs at a time; default: 2, or 1 on a single core.
      smoke: use sizes that only check whether all commands complete.
      list_only: print the runs that would be executed, and do nothing else.
      run: if false, execute nothing and write the page of what is stored.
      command: the command that the page names as its origin.

    Raises:
      UserError: unknown claims, wrong input as in `run_queue` and `MeasurementStore`, or nothing is
        finished. No page is written then.
    """
    planned = planned_runs(seeds, smoke)
    names = [name for claim in claims_named(only) for name in claim.needs(seeds)]
    jobs = jobs if jobs is not None else min(2, available_cores())
    store = MeasurementStore(keep or out / "kept", planned)
    for name, why in store.outdated.items():
        print(f"{store.folder}: {name} {why}: ignored", file=sys.stderr)
    todo = store.missing_runs(names, out)
    if list_only:
        print(describe_runs(todo, planned, out, jobs))
        return QueueResult({})
    outcome = run_queue(todo, out, jobs) if run else QueueResult({})
    store.add_finished(out)
    if not store.entries:
        if outcome.failed or outcome.stopped:
            return outcome
        raise UserError(
            f"no run is finished in {out}, and no measurement is stored in {store.folder}: there is no page to write"
        )
    text = reproduction_page(planned, out, store, seeds, command, smoke)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_stream(file) as stream:
        stream.write(text.encode())
    print(f"{text}\n{file}")
    return outcome


def seeds_of(given: Sequence[str]) -> list[int]:
    """Parse seeds from a flag. Raises UserError for an empty list, duplicates, or anything but whole
    numbers."""
    if not given or len(set(given)) < len(given) or not all(seed.isdigit() for seed in given):
        raise UserError(f"seeds={','.join(given)} must be whole numbers, one or more, each once")
    return [int(seed) for seed in given]
