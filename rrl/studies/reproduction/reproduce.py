"""Run the whole reproduction: execute missing runs, store what they measured, and write the page."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rrl.errors import UserError
from rrl.files import atomic_stream
from rrl.studies.reproduction.claims import claims_named
from rrl.studies.reproduction.options import RunOptions
from rrl.studies.reproduction.page import describe_runs, reproduction_page
from rrl.studies.reproduction.plan import planned_runs
from rrl.studies.reproduction.queue import QueueResult, run_queue
from rrl.studies.reproduction.store import MeasurementStore


def reproduce(
    out: Path,
    page: Path,
    options: RunOptions,
    *,
    store_folder: Path | None = None,
    only: Sequence[str] = (),
    command: str = "python launch/reproduce.py",
) -> QueueResult:
    """Execute the missing runs of the claims, store their measurements and write the page.

    The page covers all stored measurements. It is also written if a run failed or a signal ended the
    runs, unless nothing is stored.

    Args:
      out: folder of the runs.
      page: the file to write, Markdown.
      options: seeds, sizes, and which runs are executed.
      store_folder: folder of the `MeasurementStore`; default: `out`/kept.
      only: keys of the claims whose runs are executed; empty: all.
      command: the command that the page names as its origin.

    Raises:
      UserError: unknown claims, wrong input as in `run_queue` and `MeasurementStore`, or nothing is finished. No page is written
        then.
    """
    planned = planned_runs(options.seeds, options.smoke)
    names = [name for claim in claims_named(only) for name in claim.needs(options.seeds)]
    store = MeasurementStore(store_folder or out / "kept", planned)
    for name, reason in store.outdated.items():
        print(f"{store.folder}: {name} {reason}: ignored", file=sys.stderr)
    todo = store.missing_runs(names, out)
    if options.list_only:
        print(describe_runs(todo, planned, out, options.jobs_or_default))
        return QueueResult({})
    outcome = run_queue(todo, out, options.jobs_or_default) if options.execute else QueueResult({})
    store.add_finished(out)
    if not store.entries:
        if outcome.failed or outcome.stopped:
            return outcome
        raise UserError(
            f"no run is finished in {out}, and no measurement is stored in {store.folder}: there is no page to write"
        )
    text = reproduction_page(planned, out, store, options.seeds, command, options.smoke)
    page.parent.mkdir(parents=True, exist_ok=True)
    with atomic_stream(page) as stream:
        stream.write(text.encode())
    print(f"{text}\n{page}")
    return outcome
