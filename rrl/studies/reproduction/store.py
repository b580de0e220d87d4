"""Stores the measurements of finished runs in small files. The page can then be made again after the folders of the runs are
deleted.

The folder of the store has one file per run: its manifest, the manifests of the runs whose models it
started from, the data that the claims read, and for an evaluation its result card. A stored run is not
executed again, unless the plan changed or a run that it started from was repeated since.
"""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rrl.errors import UserError
from rrl.eval.evaluation_run import EvaluationRun, load_run
from rrl.eval.result_card import ResultCard, card_from_json
from rrl.eval.score_report import CUTS, costs
from rrl.files import atomic_stream
from rrl.runs.metrics import read_metrics
from rrl.studies.reproduction.manifest import RunManifest, load_manifest, manifest_mismatch
from rrl.studies.reproduction.plan import PlannedRun, with_dependencies
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
"""Columns of metrics.jsonl that are stored."""
SUFFIX = ".json.gz"
_KEYS = {"manifest": "record"}
"""Field of `StoredMeasurement` -> its key in the file, if they differ. Published files have the old name."""


@dataclasses.dataclass(frozen=True)
class StoredMeasurement:
    """The stored data of one run."""

    manifest: RunManifest
    needs: Mapping[str, RunManifest]
    """Manifests of the runs whose models it started from, as they were at that time."""
    evaluation: EvaluationResult | None = None
    card: ResultCard | None = None
    """Result card of an evaluation, with "{out}" for the folder of all runs."""
    training: Sequence[Mapping[str, float]] = ()
    """Lines of a training run's metrics.jsonl, with the columns `STORED_COLUMNS`."""

    def save(self, file: Path) -> None:
        """Write it as gzipped JSON. The file has no timestamp: equal results give equal bytes."""
        values = {_KEYS.get(name, name): value for name, value in dataclasses.asdict(self).items()}
        if self.evaluation is not None:
            values["evaluation"]["columns"] = {n: v.tolist() for n, v in self.evaluation.columns.items()}
        with atomic_stream(file) as stream:
            stream.write(gzip.compress(json.dumps(values).encode(), mtime=0))

    @staticmethod
    def load(file: Path) -> "StoredMeasurement":
        """Read a file. Raises UserError if it is damaged."""
        try:
            values = json.loads(gzip.decompress(file.read_bytes()))
            evaluation, card = values["evaluation"], values["card"]
            if evaluation is not None:
                columns = {name: np.array(column, float) for name, column in evaluation["columns"].items()}
                evaluation = EvaluationResult(**{**evaluation, "columns": columns})
            needs = {name: RunManifest(**manifest) for name, manifest in values["needs"].items()}
            card = None if card is None else card_from_json(card)
            return StoredMeasurement(
                RunManifest(**values["record"]), needs, evaluation, card, values["training"]
            )
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{file} is damaged ({error!r}); delete it, and its run is executed again"
            ) from error


class MeasurementStore:
    """The measurements of planned runs in one folder."""

    def __init__(self, folder: Path, planned: Mapping[str, PlannedRun]) -> None:
        """Load the folder. Raises UserError for a damaged file, and if `folder` is a file."""
        if folder.exists() and not folder.is_dir():
            raise UserError(f"keep={str(folder)!r} is a file; give a folder")
        self.folder = folder
        self._planned = planned
        self.entries: dict[str, StoredMeasurement] = {}
        """Run -> its valid measurement."""
        self.outdated: dict[str, str] = {}
        """Run whose stored measurement is not used -> reason."""
        for name, run in planned.items():
            if self._file(name).exists():
                entry = StoredMeasurement.load(self._file(name))
                if why := manifest_mismatch(entry.manifest, run):
                    self.outdated[name] = why
                else:
                    self.entries[name] = entry
        self._drop_outdated()

    def missing_runs(self, names: Sequence[str], out: Path) -> list[PlannedRun]:
        """Return the runs to execute for these names.

        They are the runs without a stored measurement, and the runs that those need. If a needed run trains
        its model again, stored runs that started from the old model are executed again too.
        """
        missing = [name for name in names if name not in self.entries]
        while True:
            todo = with_dependencies(missing, self._planned)
            retrained = {run.name for run in todo if not self._is_current(run, out)}
            stale = [
                name
                for name in names
                if name not in missing
                and any(run.name in retrained for run in with_dependencies([name], self._planned))
            ]
            if not stale:
                return todo
            missing += stale

    def add_finished(self, out: Path) -> None:
        """Store the measurements of planned runs that are finished in `out`, replacing older ones.

        Runs that other settings produced are ignored. Raises UserError for a damaged manifest.
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
        """Return a stored evaluation in the form that reports read: answer and retrieval metrics, searches
        and tokens."""
        entry = self.entries[name]
        assert entry.evaluation is not None and entry.card is not None, name
        columns = dict(entry.evaluation.columns)
        metrics = {metric: columns.pop(metric) for metric in ("em", "f1")}
        report = {"metrics": list(metrics), "cost": costs(columns, metrics["em"])}
        if entry.card.corpus:
            report["retrieval"] = entry.evaluation.hits.report(CUTS)
        return EvaluationRun(name, self._file(name), entry.card, report, metrics, entry.evaluation.ids)

    def results(self, seeds: Sequence[int]) -> ReproductionResults:
        """Return the measurements in the form that claims read."""

        def evaluation(name: str) -> EvaluationResult:
            result = self.entries[name].evaluation
            assert result is not None, name
            return result

        return ReproductionResults(seeds, evaluation, lambda name: self.entries[name].training)

    def _drop_outdated(self) -> None:
        """Drop measurements whose starting model has been trained again since."""
        for name in self._planned:  # each run comes after those that it needs
            entry = self.entries.get(name)
            if entry is not None and any(
                self._was_replaced(need, manifest) for need, manifest in entry.needs.items()
            ):
                del self.entries[name]
                self.outdated[name] = f"started from {', '.join(entry.needs)}, which was repeated since"

    def _was_replaced(self, need: str, manifest: RunManifest) -> bool:
        """Return whether the run `need` was executed again since its manifest was `manifest`."""
        return need in self.outdated or (need in self.entries and self.entries[need].manifest != manifest)

    def _is_current(self, run: PlannedRun, out: Path) -> bool:
        """Return whether the run in `out` is the one that is stored, so that its model is not trained again."""
        manifest = load_manifest(run, out, allow_mismatch=True)
        return run.name in self.entries and manifest == self.entries[run.name].manifest

    def _manifest(self, need: str, out: Path) -> RunManifest:
        manifest = load_manifest(self._planned[need], out, allow_mismatch=True)
        if manifest is None:
            raise UserError(
                f"{out / need}.json is missing, so the starting model is unknown; execute the run {need} again"
            )
        return manifest

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"


def _relocatable(card: ResultCard, out: Path) -> ResultCard:
    """Return a card with "{out}" for the folder of all runs."""
    model, command = (text.replace(str(out), "{out}") for text in (card.model, card.command))
    return dataclasses.replace(card, model=model, command=command)
