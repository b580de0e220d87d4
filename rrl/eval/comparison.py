"""Compare finished evaluations: metrics with intervals, paired tests against the first, and notes on what is not comparable.

Read `load_run` and `comparison_rows` first.
"""

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from rrl.data.questions import Question, load_questions
from rrl.data.trajectory import Trajectory
from rrl.data.trajectory_files import load_trajectories
from rrl.errors import UserError
from rrl.eval.intervals import PairedComparison, bootstrap, compare
from rrl.eval.result_card import UNKNOWN_CORPUS, ResultCard, card_from_json, differences
from rrl.eval.scoring import REPORT_WARNINGS, report_warnings
from rrl.retrieval.gold import TITLES
from rrl.text.spans import Tag

STAGES = ("answer", "search", "read", "judge")
"""Stages of an evaluation whose seconds are measured: the rollout, its searches, the reader model, and the judge."""
COSTS = (
    "searches",
    "turns",
    "tokens",
    "prompt_tokens",
    "environment_tokens",
    "reader_prompt_tokens",
    "reader_tokens",
    "tokens_when_correct",
    "tokens_per_correct",
    "all_tokens_per_correct",
)
"""Costs that tables show. "tokens" are those that the policy sampled."""
RETRIEVAL = (
    "recall",
    "full_recall",
    "map",
    "hits",
    "mrr",
    "passages",
    "eta_re",
    "hits_by_answer",
    "mrr_by_answer",
)
"""Metrics of retrieval that tables show (see `rrl.retrieval.gold`). "passages" is the mean number
of retrieved passages. "eta_re" is R2AG's efficiency (Table A.6). "..._by_answer" counts passages that contain a gold answer."""


@dataclasses.dataclass(frozen=True)
class EvaluationRun:
    """One finished evaluation, read from its folder."""

    name: str
    folder: Path
    card: ResultCard
    report: Mapping[str, Any]
    """metrics.json (see `rrl.eval.scoring.report`)."""
    metrics: Mapping[str, Float[np.ndarray, "Q"]]
    """One value per question."""
    ids: Sequence[str]
    """Ids of the questions, in the same order."""
    retrieval_metrics: Mapping[str, Float[np.ndarray, "Q"]] = dataclasses.field(default_factory=dict)
    """recall, full_recall, map, hits and mrr; NaN for questions without gold passages, empty if no question has any."""

    @property
    def main_metric(self) -> str:
        """The metric that counts an answer as right or wrong."""
        return "acc" if "acc" in self.metrics else "em"

    @property
    def tags(self) -> dict[Tag, str]:
        """Tags of the policy's text, as in `Recipe.tags`."""
        pairs = self.report.get("tags", [])
        return {tuple(tag) if isinstance(tag, list) else tag: kind for tag, kind in pairs}

    @property
    def training_metrics(self) -> Path | None:
        """metrics.jsonl of the policy's training run, or None if the policy is not in that run's workdir."""
        file = Path(self.card.model).parent / "metrics.jsonl"
        return file if file.is_file() else None

    @property
    def has_trajectories(self) -> bool:
        """Whether the folder has questions and trajectories; that of a scored prediction file has neither."""
        return (self.folder / "questions.jsonl").is_file() and (self.folder / "results.jsonl").is_file()

    def questions(self) -> list[Question]:
        """Return the questions, in the order of `metrics`."""
        return load_questions(self.folder / "questions.jsonl")

    def trajectories(self, ids: Sequence[str]) -> dict[str, Trajectory]:
        """Return the trajectories of some questions by id, with their scores as metrics. Raises UserError if one is missing."""
        position = {question.id: at for at, question in enumerate(self.questions())}
        by_id = {}
        for trajectory in load_trajectories(self.folder / "results.jsonl"):
            identity = trajectory.question.id
            if identity in ids:
                values = {name: float(column[position[identity]]) for name, column in self.metrics.items()}
                trajectory.metrics = values | {"em": values[self.main_metric]}
                by_id[identity] = trajectory
        if missing := [identity for identity in ids if identity not in by_id]:
            raise UserError(
                f"run {self.folder}: results.jsonl has no answer to the question {missing[0]!r}; run its command again, which "
                "answers the missing questions"
            )
        return by_id


def load_run(folder: str | Path, name: str = "") -> EvaluationRun:
    """Read the folder of `rrl.eval.evaluate.run`, or of launch/score.py with a card.

    Raises UserError if the folder is not an evaluation, is not finished, is damaged, or has no card.
    """
    folder = Path(folder)
    if not (folder / "metrics.json").is_file():
        if (folder / "results.jsonl").is_file():
            done = (folder / "results.jsonl").read_bytes().count(b"\n")
            raise UserError(
                f"run {folder}: not finished ({done} questions are answered); run its command again to continue it"
            )
        raise UserError(
            f"run {folder}: not an evaluation (it has no metrics.json); give a folder of launch/eval.py"
        )
    try:
        report = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
        metrics = {name: np.array([line[name] for line in lines]) for name in report["metrics"]}
        ids = [str(line["id"]) for line in lines]
        retrieval_metrics = {
            name: np.array([line[name] for line in lines], np.float64)
            for name in report.get("retrieval_intervals", {})
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"run {folder}: its metrics.json or scores.jsonl is damaged ({error!r}); run its command again, which writes both"
        ) from error
    if "card" not in report:
        raise UserError(
            f"run {folder}: its metrics.json has no result card; launch/eval.py writes one, and launch/score.py does with --card"
        )
    try:
        card = card_from_json(report["card"])
    except UserError as error:
        raise UserError(f"run {folder}: metrics.json, card: {error}") from error
    if len(lines) != card.questions:
        raise UserError(
            f"run {folder}: scores.jsonl has {len(lines)} lines for {card.questions} questions; run its command again, which "
            "writes it"
        )
    return EvaluationRun(
        name or folder.name.removeprefix("eval-"), folder, card, report, metrics, ids, retrieval_metrics
    )


def load_runs(folders: Sequence[str | Path]) -> list[EvaluationRun]:
    """Read several runs. Runs whose folders have the same name are named by their paths.

    Raises UserError for no folder, a folder that is given twice, and as `load_run` does.
    """
    paths = [Path(folder).resolve() for folder in folders]
    if not paths:
        raise UserError("no run: give the folder of one evaluation or more")
    if repeated := [str(path) for path in paths if paths.count(path) > 1]:
        raise UserError(f"run {repeated[0]} is given twice; give each once")
    names = [path.name for path in paths]
    ambiguous = {name for name in names if names.count(name) > 1}
    return [load_run(given, str(given) if name in ambiguous else "") for given, name in zip(folders, names)]


def paired_test(
    first: EvaluationRun, run: EvaluationRun, metric: str, level: float = 0.95, seed: int = 0
) -> PairedComparison | None:
    """Compare `run` with `first` on the same questions by a metric of answers or of retrieval.

    Returns None if the questions or gold passages differ, or if one run lacks the metric. Raises UserError if the runs list their
    questions in different orders.
    """
    same = first.card.questions_sha256 == run.card.questions_sha256
    if metric in first.retrieval_metrics:
        gold = {card.gold_sha256 for card in (first.card, run.card)} - {""}
        by = {
            either.report.get("retrieval_by", TITLES) for either in (first, run) if either.retrieval_metrics
        }
        same = same and len(gold) < 2 and len(by) < 2
    first_values, second_values = (
        {**either.metrics, **either.retrieval_metrics}.get(metric) for either in (first, run)
    )
    if run is first or not same or first_values is None or second_values is None:
        return None
    if list(first.ids) != list(run.ids):
        raise UserError(
            f"the scores.jsonl of the runs {first.name} and {run.name} are in different orders; run their commands again, which "
            "write them"
        )
    known = ~(np.isnan(first_values) | np.isnan(second_values))  # recall is undefined without gold passages
    if not known.any():
        return None
    return compare(first_values[known], second_values[known], level=level, seed=seed)


def comparability_notes(runs: Sequence[EvaluationRun]) -> list[str]:
    """Return notes on what makes the runs not comparable (corpus, retriever, questions, ...) and on failures in each run."""
    unknown = [run.name for run in runs if run.card.corpus and not run.card.corpus_sha256]
    lines = differences({run.name: run.card for run in runs})
    if unknown and len(runs) > 1:
        lines.append(f"corpus unknown for {', '.join(unknown)}: {UNKNOWN_CORPUS}, so it may differ")
    return lines + [f"{run.name}: {line}" for run in runs for line in report_warnings(run.report)]


def is_comparable(first: EvaluationRun, run: EvaluationRun) -> bool:
    """Return whether a run has the same setting as the first and no failures."""
    return not (differences({"first": first.card, "run": run.card}) or report_warnings(run.report))


def shared_settings(runs: Sequence[EvaluationRun]) -> list[tuple[str, str]]:
    """Return (name, value) of the settings that are the same in all runs, as text."""
    different = {line.partition(" differs: ")[0] for line in comparability_notes(runs)}
    return [(part, value) for part, value in runs[0].card.setting.items() if part not in different]


def comparison_rows(
    runs: Sequence[EvaluationRun], level: float = 0.95, seed: int = 0
) -> list[dict[str, Any]]:
    """Return one flat record per run: card, metrics with intervals, differences from the first run with p, retrieval, costs."""
    rows = []
    for run in runs:
        card = run.card
        row: dict[str, Any] = {"run": run.name, "method": card.method, "model": card.model}
        row |= {"dataset": card.dataset, "questions": card.questions, "corpus": card.corpus}
        row |= {
            "corpus_passages": card.passages,
            "retriever": card.retriever.get("kind", ""),
            "top_k": card.top_k,
        }
        row |= {
            "seed": card.seed,
            "normalization": card.normalization,
            "comparable": is_comparable(runs[0], run),
        }
        for metric, values in (*run.metrics.items(), *run.retrieval_metrics.items()):
            interval = bootstrap(values[~np.isnan(values)], level=level, seed=seed)
            row |= {metric: interval.mean, f"{metric}_low": interval.low, f"{metric}_high": interval.high}
            test = paired_test(runs[0], run, metric, level, seed)
            if test is not None:
                row |= {
                    f"{metric}_difference": test.difference,
                    f"{metric}_difference_low": test.low,
                    f"{metric}_difference_high": test.high,
                    f"{metric}_p": test.p,
                }
        row |= {name: run.report.get(name, 0) for name, _ in REPORT_WARNINGS}
        row |= run.report.get("retrieval", {}) | run.report.get("cost", {})
        by_answer = run.report.get("retrieval_by_answer", {})
        row |= {f"{name}_by_answer": value for name, value in by_answer.items()}
        row |= {f"seconds_{stage}": value for stage, value in run.report.get("seconds", {}).items()}
        rows.append(row)
    return rows


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the records as CSV with a column for every field."""
    fields = list(dict.fromkeys(field for row in rows for field in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


Table = list[tuple[str, ...]]
"""The rows of a table in a report; the first is its head."""


def main_table(runs: Sequence[EvaluationRun], rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of each run's metrics with intervals, and the difference of the main metric from the first run's."""
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.metrics))
    main = runs[0].main_metric
    against = f"{main} against the first"
    table: Table = [("run", "model", *metrics, *([against] if len(runs) > 1 else []))]
    for run, row in zip(runs, rows, strict=True):
        cells = [run.name + ("" if is_comparable(runs[0], run) else " *"), run.card.model]
        for metric in metrics:
            cells.append(_interval(row, metric) if metric in row else "–")
        if len(runs) > 1:
            cells.append(_difference(row, main))
        table.append(tuple(cells))
    return table


def cost_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of searches, turns and tokens (means over questions), and tokens per right answer; [] if none are known."""
    names = [name for name in COSTS if any(name in row for row in rows)]
    table: Table = [("per question", *map(_words, names))]
    table += [(row["run"], *(f"{row[name]:.2f}" if name in row else "–" for name in names)) for row in rows]
    return table if names else []


def retrieval_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of how well the retrieved passages cover the gold ones, with intervals; [] if no run has gold passages.

    Its last column is the difference of full recall from the first run's.
    """
    names = [name for name in RETRIEVAL if any(name in row for row in rows)]
    known = [row for row in rows if any(name in row for name in names)]
    if not known:
        return []
    tested = any("full_recall_p" in row for row in known)
    table: Table = [("run", *map(_words, names), *["full recall against the first"] * tested)]
    for row in known:
        shown = [_retrieval_cell(row, name) if name in row else "–" for name in names]
        table.append((row["run"], *shown, *[_difference(row, "full_recall")] * tested))
    return table


def _retrieval_cell(row: Mapping[str, Any], name: str) -> str:
    if name == "passages":
        return f"{row[name]:.2f}"
    return _interval(row, name) if f"{name}_low" in row else f"{100 * row[name]:.1f}"


def group_table(runs: Sequence[EvaluationRun], group: str) -> Table:
    """Return a table of the main metric by kind (`group` "by_kind") or by hops ("by_hops"), with numbers of questions.

    The numbers of a run are left out if they equal those of the first. Returns [] if no run has the groups.
    """
    labels = sorted({label for run in runs for label in run.report.get(group, {})})
    if not labels:
        return []
    table: Table = [(f"{runs[0].main_metric} {_words(group)}", *map(_words, labels))]
    for run in runs:
        parts = run.report.get(group, {})
        shown = (f"{100 * parts[label][run.main_metric]:.1f}" if label in parts else "–" for label in labels)
        table.append((run.name, *shown))
    for run in runs:
        parts = run.report.get(group, {})
        counts = tuple(str(parts[label]["questions"]) if label in parts else "–" for label in labels)
        if run is runs[0] or counts != table[len(runs) + 1][1:]:
            table.append(("questions" if run is runs[0] else f"questions of {run.name}", *counts))
    return table


def latency_table(runs: Sequence[EvaluationRun]) -> Table:
    """Return a table of seconds per question by stage; [] if no run has any."""
    stages = [s for s in STAGES if any(s in r.report.get("seconds", {}) for r in runs)]
    table: Table = [("seconds per question, batched", *stages, "questions measured")]
    for run in runs:
        seconds = run.report.get("seconds", {})
        shown = (f"{seconds[s]:.3f}" if s in seconds else "–" for s in stages)
        # An interrupted batch has no time, so a resumed run has times for only some of its questions.
        table.append((run.name, *shown, str(run.report.get("timed", "–"))))
    return table if stages else []


def tables(runs: Sequence[EvaluationRun], rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return all tables of a report, in order."""
    every = [main_table(runs, rows), group_table(runs, "by_kind"), group_table(runs, "by_hops")]
    every += [retrieval_table(rows), cost_table(rows), latency_table(runs)]
    return [table for table in every if table]


def as_markdown(runs: Sequence[EvaluationRun], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a report in Markdown: settings shared by all runs, the main table, notes on comparability, the other tables."""
    lines = [f"- {part}: {value}" for part, value in shared_settings(runs)]
    first, *others = tables(runs, rows)
    lines += ["", "Percent, with intervals over questions.", "", *_markdown(first)]
    if notes := comparability_notes(runs):
        lines += ["", "\\* not directly comparable with the first row:", ""]
        lines += [f"- {note}" for note in notes]
    for table in others:
        lines += ["", *_markdown(table)]
    return "\n".join(lines) + "\n"


def _markdown(table: Table) -> list[str]:
    head, *body = [[cell.replace("|", "\\|").replace("*", "\\*") for cell in row] for row in table]
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *body)]


def _interval(row: Mapping[str, Any], metric: str) -> str:
    return f"{100 * row[metric]:.1f} [{100 * row[f'{metric}_low']:.1f}, {100 * row[f'{metric}_high']:.1f}]"


def _difference(row: Mapping[str, Any], metric: str) -> str:
    if f"{metric}_p" not in row:
        return "–"
    low, high = 100 * row[f"{metric}_difference_low"], 100 * row[f"{metric}_difference_high"]
    return f"{100 * row[f'{metric}_difference']:+.1f} [{low:+.1f}, {high:+.1f}], p = {row[f'{metric}_p']:.2g}"


def _words(name: str) -> str:
    return name.replace("_", " ")
