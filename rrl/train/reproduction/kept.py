"""What finished runs have measured, in small files that outlive their folders, so that a page can be made again without them.

A folder of kept results has a file for each run: its record, the versions it ran with, and what the claims read of it. What is
kept is not run again; what another command or other settings made is, once the plan has changed.
"""

import dataclasses
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rrl.errors import UserError
from rrl.eval.result_card import versions_here
from rrl.retrieval.files import replaced
from rrl.train.metrics import read_metrics
from rrl.train.reproduction.plan import Run
from rrl.train.reproduction.queue import Record, matches, record_of
from rrl.train.reproduction.results import Evaluation, Results, read_evaluation

READ = ("step", "reward/answer", "minutes")
"""Columns of metrics.jsonl that are kept."""
SUFFIX = ".json.gz"


class Kept:
    """A folder of kept results for a plan."""

    def __init__(self, folder: Path, known: Mapping[str, Run]) -> None:
        """Raises UserError for a damaged file."""
        self.folder = folder
        self._known = known
        self.records: dict[str, Record] = {}
        """Of the runs that are kept, by name."""
        self.versions: dict[str, str] = {}
        """What each ran with."""
        self.outdated: list[str] = []
        """Runs that are there as another command or other settings made them."""
        for name, run in known.items():
            if (folder / f"{name}{SUFFIX}").exists():
                told = self._read(name)
                record = Record(**told["record"])
                if matches(record, run):
                    self.records[name], self.versions[name] = record, told["versions"]
                else:
                    self.outdated.append(name)

    def take(self, out: Path) -> None:
        """Keeps what the runs of the plan that are finished in `out` measured, in place of what was kept of them.

        Raises UserError as `rrl.train.reproduction.queue.record_of`.
        """
        for name, run in self._known.items():
            record = record_of(run, out)
            if record is None or not record.finished or record == self.records.get(name):
                continue
            told: dict[str, Any] = {"record": dataclasses.asdict(record), "versions": _versions()}
            if run.launcher == "eval":
                told["evaluation"] = _as_json(read_evaluation(out / name))
            elif run.launcher == "train":
                lines = read_metrics(out / name / "metrics.jsonl")
                told["training"] = [{key: line[key] for key in READ if key in line} for line in lines]
            self.folder.mkdir(parents=True, exist_ok=True)
            with replaced(self._file(name)) as stream:  # no time in it: the same results are the same bytes
                stream.write(gzip.compress(json.dumps(told).encode(), mtime=0))
            self.records[name], self.versions[name] = record, told["versions"]
            if name in self.outdated:
                self.outdated.remove(name)

    def results(self, seeds: Sequence[int]) -> Results:
        """What the claims read, each file once."""

        def evaluation(name: str) -> Evaluation:
            return _from_json(self._read(name)["evaluation"])

        def training(name: str) -> Sequence[Mapping[str, float]]:
            return self._read(name)["training"]

        once: Callable[..., Any] = cache
        return Results(seeds, once(evaluation), once(training))

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    def _read(self, name: str) -> dict[str, Any]:
        file = self._file(name)
        try:
            return json.loads(gzip.decompress(file.read_bytes()))
        except (OSError, EOFError, ValueError) as error:
            raise UserError(f"{file} is damaged ({error}); delete it, and its run is done again") from error


def _versions() -> str:
    return ", ".join(f"{name} {version}" for name, version in versions_here().items())


def _as_json(found: Evaluation) -> dict[str, Any]:
    told = dataclasses.asdict(found)
    return told | {"columns": {name: values.tolist() for name, values in found.columns.items()}}


def _from_json(told: Mapping[str, Any]) -> Evaluation:
    columns = {name: np.array(values, float) for name, values in told["columns"].items()}
    return Evaluation(**{**told, "columns": columns})
