"""The plan of an analysis: its points, the runs that they need, and where those are executed or stored."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rrl.errors import UserError
from rrl.eval.evaluation_run import EvaluationRun
from rrl.eval.settings import EvaluationSettings
from rrl.runs.launcher import load_config
from rrl.runs.metrics import read_metrics
from rrl.runs.retriever import load_retriever
from rrl.studies.analyses.catalogue import Analysis
from rrl.studies.analyses.points import (
    AnalysisPoint,
    EvaluationOptions,
    evaluation_points,
    training_points,
)
from rrl.studies.reproduction.options import RunOptions
from rrl.studies.reproduction.plan import PlannedRun, with_dependencies
from rrl.studies.reproduction.store import MeasurementStore

TRAINING_FOLDERS = {False: "runs/reproduce", True: "runs/reproduce-smoke"}
"""Whether it is a smoke run -> default folder of the training runs. launch/reproduce.py has the same default, so each training
run is executed only once."""


@dataclasses.dataclass(frozen=True)
class AnalysisFolders:
    """The folders of an analysis."""

    out: Path
    """Folder of table and plot, and of the evaluations of existing policies."""
    training: Path | None = None
    """Folder of training runs and the evaluations of their policies; default: the folder of launch/reproduce.py."""
    store: Path | None = None
    """Folder of a `MeasurementStore`, such as docs/reproduction with the published measurements. Runs that it holds are not
    executed again."""


@dataclasses.dataclass(frozen=True)
class AnalysisPlan:
    """The points of an analysis and their runs."""

    analysis: Analysis
    points: Sequence[AnalysisPoint]
    planned: Mapping[str, PlannedRun]
    """Runs by name."""
    folder: Path
    """Folder in which the runs are executed."""
    store: MeasurementStore | None = None
    settings: Sequence[EvaluationSettings] = ()
    """Settings of the evaluations of existing policies."""

    @property
    def evaluations(self) -> list[str]:
        """Names of the evaluations of all points."""
        return [name for point in self.points for name in point.runs]

    def runs_to_execute(self) -> list[PlannedRun]:
        """Return the runs without a stored measurement, and the runs that those need. Some may be finished in `folder`."""
        if self.store is None:
            return with_dependencies(self.evaluations, self.planned)
        return self.store.missing_runs(self.evaluations, self.folder)

    def require_services(self) -> None:
        """Raise UserError if a search service does not respond. Otherwise each run would start and fail separately."""
        services = {
            (settings.retriever.index, settings.retriever.form): settings
            for settings in self.settings
            if settings.searches
        }
        for (index, _), settings in services.items():
            if index.startswith("http"):
                load_retriever((), settings.retriever, None, settings.rollout.search_seconds)

    def stored_evaluations(self, finished: set[str]) -> dict[str, EvaluationRun]:
        """Return run -> its stored evaluation, for evaluations that are not among `finished`."""
        if self.store is None:
            return {}
        return {
            name: self.store.evaluation_run(name)
            for name in self.evaluations
            if name in self.store.entries and name not in finished
        }

    def training_metrics(self, evaluation: str, stored: bool) -> Sequence[Mapping[str, Any]]:
        """Return the metrics.jsonl lines of the run that trained the evaluated policy; empty if there are none.

        `stored` tells whether they are read from the store.
        """
        name = evaluation.removesuffix("-eval")
        if self.store is not None and stored:
            return self.store.entries[name].training if name in self.store.entries else ()
        file = self.folder / name / "metrics.jsonl"
        return read_metrics(file) if file.is_file() else ()


def plan_analysis(
    name: str,
    analysis: Analysis,
    folders: AnalysisFolders,
    evaluation: EvaluationOptions,
    options: RunOptions,
) -> AnalysisPlan:
    """Return the plan of an analysis.

    Args:
      name: name of the analysis, for error messages.
      analysis: the analysis.
      folders: where the runs are executed and stored.
      evaluation: policies and values, for an analysis of existing policies.
      options: seeds and sizes.

    Raises:
      UserError: options that do not apply to the analysis, or as `training_points` and `evaluation_points`.
    """
    if analysis.arms:
        if any(dataclasses.astuple(evaluation)):
            raise UserError(
                f"what={name!r} trains its own policies: leave out --policy, --values, --arguments and --set"
            )
        points, planned = training_points(analysis, options.seeds, options.smoke)
        store = None if folders.store is None else MeasurementStore(folders.store, planned)
        folder = folders.training or Path(TRAINING_FOLDERS[options.smoke])
        return AnalysisPlan(analysis, points, planned, folder, store)
    if folders.store is not None:
        raise UserError(f"what={name!r} evaluates existing policies: leave out --keep")
    points, planned = evaluation_points(analysis, evaluation, options.smoke)
    settings = [EvaluationSettings.parse(_config_of(run)) for run in planned.values()]
    return AnalysisPlan(analysis, points, planned, folders.out, settings=settings)


def _config_of(run: PlannedRun) -> Any:
    return load_config(run.config, [f"{field}={value}" for field, value in run.fields.items()])
