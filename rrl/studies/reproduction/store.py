"""What finished runs have measured, in small files that outlive their folders, so that a page can be made again without them.

A folder of kept results has a file for each run: its manifest, those of the runs whose models it started from, and what the
claims read of it; of an evaluation the result card too. What is kept is not run again, unless the plan has changed, or a run
that it started from was done anew since.
"""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rrl.errors import UserError
from rrl.eval.comparison import Run as EvaluationRun
from rrl.eval.comparison import load_run
from rrl.eval.result_card import ResultCard, card_of
from rrl.eval.scoring import CUTS, costs
from rrl.files import replaced
from rrl.runs.metrics import read_metrics
from rrl.studies.reproduction.plan import PlannedRun, with_dependencies
from rrl.studies.reproduction.queue import RunManifest, load_manifest, manifest_mismatch
from rrl.studies.reproduction.results import EvaluationResult, ReproductionResults, read_evaluation

STORED_COLUMNS = (
    "step",
    "minutes",
    "reward/answer",
    "reward/thinking",
    "reward/total",
    "train/auxiliary_weight",
    "train/searches",
)
"""Columns of metrics.jsonl that are kept."""
SUFFIX = ".json.gz"
_KEYS = {"manifest": "record"}
"""Field -> its key on disk, where they differ."""


@dataclasses.dataclass(frozen=True)
class StoredMeasurement:
    """What is kept of a run."""

    manifest: RunManifest
    needs: Mapping[str, RunManifest]
    """Of the runs whose models it started from, as they were then."""
    evaluation: EvaluationResult | None = None
    card: ResultCard | None = None
    """Of an evaluation, with "{out}" for the folder of all runs."""
    training: Sequence[Mapping[str, float]] = ()
    """Of a training run the lines of metrics.jsonl, as far as `STORED_COLUMNS` goes."""

    def save(self, file: Path) -> None:
        """Writes it as JSON, gzipped. No time is in it: the same results are the same bytes."""
        told = {_KEYS.get(name, name): value for name, value in dataclasses.asdict(self).items()}
        if self.evaluation is not None:
            told["evaluation"]["columns"] = {n: v.tolist() for n, v in self.evaluation.columns.items()}
        with replaced(file) as stream:
            stream.write(gzip.compress(json.dumps(told).encode(), mtime=0))

    @staticmethod
    def load(file: Path) -> "StoredMeasurement":
        """Raises UserError for a damaged file."""
        try:
            told = json.loads(gzip.decompress(file.read_bytes()))
            found, card = told["evaluation"], told["card"]
            if found is not None:
                columns = {name: np.array(values, float) for name, values in found["columns"].items()}
                found = EvaluationResult(**{**found, "columns": columns})
            needs = {name: RunManifest(**manifest) for name, manifest in told["needs"].items()}
            known = None if card is None else card_of(card)
            return StoredMeasurement(RunManifest(**told["record"]), needs, found, known, told["training"])
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file} is damaged ({error!r}); delete it, and its run is done again") from error


class MeasurementStore:
    """A folder of kept results for a plan."""

    def __init__(self, folder: Path, known: Mapping[str, PlannedRun]) -> None:
        """Raises UserError for a damaged file, and where `folder` is a file."""
        if folder.exists() and not folder.is_dir():
            raise UserError(f"keep={str(folder)!r} is a file; give a folder")
        self.folder = folder
        self._planned = known
        self.entries: dict[str, StoredMeasurement] = {}
        """Of the runs that are kept, by name."""
        self.outdated: dict[str, str] = {}
        """Runs that are there and do not count, and why."""
        for name, run in known.items():
            if self._file(name).exists():
                entry = StoredMeasurement.load(self._file(name))
                if why := manifest_mismatch(entry.manifest, run):
                    self.outdated[name] = why
                else:
                    self.entries[name] = entry
        self._drop_outdated()

    def missing_runs(self, names: Sequence[str], out: Path) -> list[PlannedRun]:
        """The runs that are to be done for these: those that are not kept, what they need, and what is kept but started from a
        model that this makes anew."""
        missing = [name for name in names if name not in self.entries]
        while True:
            todo = with_dependencies(missing, self._planned)
            anew = {run.name for run in todo if not self._is_current(run, out)}
            stale = [
                name
                for name in names
                if name not in missing
                and any(run.name in anew for run in with_dependencies([name], self._planned))
            ]
            if not stale:
                return todo
            missing += stale

    def add_finished(self, out: Path) -> None:
        """Keeps what the runs of the plan that are finished in `out` measured, in place of what was kept of them.

        What other settings made there is left. Raises UserError as `rrl.studies.reproduction.queue.load_manifest` for a damaged
        manifest.
        """
        for name, run in self._planned.items():
            manifest = load_manifest(run, out, allow_mismatch=True)
            if manifest is None or not manifest.finished or manifest_mismatch(manifest, run):
                continue
            if name in self.entries and self.entries[name].manifest == manifest:
                continue
            entry = StoredMeasurement(manifest, {need: self._manifest(need, out) for need in run.needs})
            if run.launcher == "eval":
                card = _relocatable(load_run(out / name).card, out)
                entry = dataclasses.replace(entry, evaluation=read_evaluation(out / name), card=card)
            elif run.launcher == "train":
                lines = read_metrics(out / name / "metrics.jsonl")
                training = [{key: line[key] for key in STORED_COLUMNS if key in line} for line in lines]
                entry = dataclasses.replace(entry, training=training)
            self.folder.mkdir(parents=True, exist_ok=True)
            entry.save(self._file(name))
            self.entries[name] = entry
            self.outdated.pop(name, None)
        self._drop_outdated()

    def evaluation_run(self, name: str) -> EvaluationRun:
        """A kept evaluation as reports and analyses read one: metrics, coverage, searches and tokens written."""
        entry = self.entries[name]
        assert entry.evaluation is not None and entry.card is not None, name
        columns = dict(entry.evaluation.columns)
        metrics = {metric: columns.pop(metric) for metric in ("em", "f1")}
        found = {"metrics": list(metrics), "cost": costs(columns, metrics["em"])}
        if entry.card.corpus:
            found["retrieval"] = entry.evaluation.hits.report(CUTS)
        return EvaluationRun(name, self._file(name), entry.card, found, metrics, entry.evaluation.ids)

    def results(self, seeds: Sequence[int]) -> ReproductionResults:
        """What the claims read."""

        def evaluation(name: str) -> EvaluationResult:
            found = self.entries[name].evaluation
            assert found is not None, name
            return found

        return ReproductionResults(seeds, evaluation, lambda name: self.entries[name].training)

    def _drop_outdated(self) -> None:
        """Leaves out what started from a model that is no longer the one that is kept."""
        for name in self._planned:  # each after what it needs
            entry = self.entries.get(name)
            if entry is not None and any(self._was_replaced(need, was) for need, was in entry.needs.items()):
                del self.entries[name]
                self.outdated[name] = f"started from {', '.join(entry.needs)}, which was done anew since"

    def _was_replaced(self, need: str, was: RunManifest) -> bool:
        return need in self.outdated or (need in self.entries and self.entries[need].manifest != was)

    def _is_current(self, run: PlannedRun, out: Path) -> bool:
        """Whether what is kept of a run is of the life that is finished in `out`."""
        manifest = load_manifest(run, out, allow_mismatch=True)
        return run.name in self.entries and manifest == self.entries[run.name].manifest

    def _manifest(self, need: str, out: Path) -> RunManifest:
        manifest = load_manifest(self._planned[need], out, allow_mismatch=True)
        if manifest is None:
            raise UserError(
                f"{out / need}.json is not there, so that nobody knows what was measured of it; do it again"
            )
        return manifest

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"


def _relocatable(card: ResultCard, out: Path) -> ResultCard:
    """A card with "{out}" for the folder of all runs."""
    model, command = (told.replace(str(out), "{out}") for told in (card.model, card.command))
    return dataclasses.replace(card, model=model, command=command)
